"""Arguments that are written as bare text: what they are as JSON, which the function's schema says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.http.parsing.reading.literal import WORDS, python_as_json

MAX_SCHEMAS = 32  # that are looked at for one type
MAX_NAMES = 64  # in a reference; one with more points nowhere
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """The types that a schema allows; None where it does not say, or not within MAX_SCHEMAS schemas: a client that is
    not trusted wrote it, and refers to whatever it likes."""
    found: set[str] = set()
    waiting, seen = [schema], set[int]()
    for _ in range(MAX_SCHEMAS):
        if not waiting:
            return frozenset(found) or None
        one = waiting.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(ref := one.get("$ref"), str):
            waiting.append(resolved(ref, root))
        elif isinstance(named := one.get("type"), str):
            found.add(named)
        elif isinstance(named, list):
            found.update(type_ for type_ in named if isinstance(type_, str))
        elif isinstance(values := one.get("enum"), list):
            found.update(KINDS.get(kind, "null") for kind in set(map(type, values)))
        elif "const" in one:
            found.add(_kind(one["const"]))
        else:
            for name in ALTERNATIVES:
                if isinstance(options := one.get(name), list):
                    waiting += options[:MAX_SCHEMAS]
                    break
    return None


def is_always_text(types: frozenset[str] | None) -> bool:
    return types == frozenset({"string"})


def as_json(text: str, types: frozenset[str] | None) -> str:
    """The value that the bare `text` stands for."""
    bare = WORDS.get(text.strip(), text.strip())
    if types is not None and "string" in types and _kind_of_text(bare) not in types - {"string"}:
        return json.dumps(text, ensure_ascii=False)
    if _kind_of_text(bare) is not None:
        return bare
    if bare[:1] in ("[", "{") and (made := python_as_json(bare)):
        return made
    return json.dumps(text, ensure_ascii=False)


def resolved(ref: str, root: Any) -> Any:
    """What a reference within the schema points to; None where it points nowhere."""
    begin, *parts = ref.split("/", MAX_NAMES)
    found = root if begin == "#" else None
    for part in parts:
        if not isinstance(found, Mapping):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found


def _kind_of_text(text: str) -> str | None:
    """The type of the JSON value in a text; None where there is none."""
    try:
        return _kind(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _kind(value: Any) -> str:
    return KINDS.get(type(value), "null")
