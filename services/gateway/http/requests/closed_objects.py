"""Objects of a JSON schema that have their named properties and no others, where the schema does not say.

JSON schema lets any further property come; clients that make schemas of functions and classes seldom say otherwise.  A
small model that is held to such a schema adds properties for ever.  What says `additionalProperties`, whatever it says,
is left as it is, and so is an object that names no property: that is a mapping.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

VALUES = ("items", "contains", "additionalProperties", "unevaluatedProperties", "additionalItems", "prefixItems")
MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
ALTERNATIVES = ("anyOf", "oneOf")
MERGED = ("allOf", "if", "then", "else", "not", "dependentSchemas", "dependencies", "$dynamicRef")
DECIDED = ("additionalProperties", "unevaluatedProperties")


def closed(schema: Any) -> Any:
    """A copy of a schema in which objects are closed, within each other too.

    Schemas that are merged with others (`allOf` of several, a `$ref` beside `properties` ...) stay open, since each of
    them would forbid the properties of the others.
    """
    schema = json.loads(json.dumps(schema))  # no object is there twice, as in a deep copy it might be
    open_refs: frozenset[str] = frozenset()
    while True:  # what an open definition refers to is open too
        objects = list(_objects(schema, open_refs, "#", is_alone=True))
        found = open_refs | {ref for one, is_alone in objects if (ref := _merged_ref(one, is_alone=is_alone))}
        if found == open_refs:
            break
        open_refs = found
    for one, is_alone in objects:
        is_decided = any(name in one for name in DECIDED)
        if is_alone and isinstance(one.get("properties"), dict) and not (is_decided or _merges(one)):
            one["additionalProperties"] = False
    return schema


def _objects(
    schema: Any, open_refs: frozenset[str], place: str, *, is_alone: bool
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Every schema that is an object, and whether no other schema is merged with it."""
    if isinstance(schema, list):
        for one in schema:
            yield from _objects(one, open_refs, place, is_alone=is_alone)
    if isinstance(schema, dict):
        is_alone = is_alone and place not in open_refs
        yield schema, is_alone
        for inner, inner_place, stands_alone in _inner(schema, place, is_alone=is_alone):
            yield from _objects(inner, open_refs, inner_place, is_alone=stands_alone)


def _merged_ref(schema: dict[str, Any], *, is_alone: bool) -> str:
    """The reference whose schema is merged with others, if there is one."""
    ref = schema.get("$ref")
    is_merged = not is_alone or _has_own(schema) or sum(other in schema for other in _BESIDE) > 1
    return ref if is_merged and isinstance(ref, str) else ""


def _inner(schema: dict[str, Any], place: str, *, is_alone: bool) -> Iterator[tuple[Any, str, bool]]:
    """(schema or list of schemas, JSON pointer, whether nothing is merged with it), for each within."""
    for name in MAPPINGS:
        if isinstance(schema.get(name), dict):
            for key, inner in schema[name].items():
                yield inner, f"{place}/{name}/{key.replace('~', '~0').replace('/', '~1')}", True
    for name in VALUES:
        if name in schema:
            yield schema[name], f"{place}/{name}", True
    alone = is_alone and not _has_own(schema)
    for name in ALTERNATIVES:
        if name in schema:
            yield schema[name], f"{place}/{name}", alone and sum(other in schema for other in _BESIDE) == 1
    if isinstance(schema.get("allOf"), list):
        only = len(schema["allOf"]) == 1 and sum(other in schema for other in _BESIDE) == 1
        yield schema["allOf"], f"{place}/allOf", alone and only
    for name in ("then", "else"):
        if name in schema:
            yield schema[name], f"{place}/{name}", False


_BESIDE = (*ALTERNATIVES, *MERGED, "$ref")


def _has_own(schema: dict[str, Any]) -> bool:
    return "properties" in schema or "patternProperties" in schema


def _merges(schema: dict[str, Any]) -> bool:
    """Whether other schemas add to what this one says of the same value."""
    return any(name in schema for name in _BESIDE)
