"""Arguments that are written as bare text: what they are as JSON, which the function's schema says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.http.parsing.reading.literal import WORDS, python_as_json

MAX_REFS = 8  # that are followed from one schema
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """The types that a schema allows; None where it does not say."""
    if not isinstance(schema, Mapping) or depth > MAX_REFS:
        return None
    if isinstance(schema.get("$ref"), str):
        return types_of(_resolved(schema["$ref"], root), root, depth + 1)
    if isinstance(named := schema.get("type"), str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(str(one) for one in named)
    if isinstance(values := schema.get("enum"), list):
        return frozenset(_kind(value) for value in values)
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(name), list):
            found = [types_of(option, root, depth + 1) for option in options]
            known = [types for types in found if types is not None]
            return frozenset().union(*known) if known else None
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


def _resolved(ref: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the schema points to; None where it points nowhere."""
    found: Any = root
    for part in ref.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _kind_of_text(text: str) -> str | None:
    """The type of the JSON value in a text; None where there is none."""
    try:
        return _kind(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _kind(value: Any) -> str:
    return KINDS.get(type(value), "null")
