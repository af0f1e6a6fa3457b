"""Objects of a JSON schema that have their named properties and no others, where the schema does not say.

JSON schema lets any further property come; clients that make schemas of functions and classes seldom say otherwise.  A
small model that is held to such a schema adds properties for ever.  What says `additionalProperties`, whatever it says,
is left as it is, and so is an object that names no property: that is a mapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VALUES = ("items", "contains", "additionalProperties", "unevaluatedProperties", "additionalItems", "prefixItems")
MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
DEFINITIONS = ("$defs", "definitions")
ALTERNATIVES = ("anyOf", "oneOf")
MERGED = ("allOf", "if", "then", "else", "not", "dependentSchemas", "dependencies", "$dynamicRef")
DECIDED = ("additionalProperties", "unevaluatedProperties")


def closed(schema: Any) -> Any:
    """A copy of a schema in which objects are closed, within each other too.

    Schemas that are merged with others (`allOf` of several, a `$ref` beside `properties` ...) stay open, since each of
    them would forbid the properties of the others.
    """
    open_refs: frozenset[str] = frozenset()
    while True:  # what an open definition refers to is open too
        found = open_refs | {ref for ref in _merged_refs(schema, open_refs, "#") if isinstance(ref, str)}
        if found == open_refs:
            return _close(schema, found, "#", is_alone=True)
        open_refs = found


def _close(schema: Any, open_refs: frozenset[str], place: str, *, is_alone: bool) -> Any:
    if isinstance(schema, list):
        return [_close(one, open_refs, place, is_alone=is_alone) for one in schema]
    if not isinstance(schema, dict):
        return schema
    is_alone = is_alone and place not in open_refs
    found = dict(schema)
    for name, inner, inner_place, stands_alone in _inner(schema, place, is_alone=is_alone):
        if name in MAPPINGS:
            found[name] = found[name] if found[name] is not schema[name] else dict(schema[name])
            key = inner_place.rpartition("/")[2].replace("~1", "/").replace("~0", "~")
            found[name][key] = _close(inner, open_refs, inner_place, is_alone=stands_alone)
        else:
            found[name] = _close(inner, open_refs, inner_place, is_alone=stands_alone)
    is_decided = any(name in schema for name in DECIDED)
    if is_alone and isinstance(schema.get("properties"), dict) and not (is_decided or _merges(schema)):
        found["additionalProperties"] = False
    return found


def _inner(schema: dict[str, Any], place: str, *, is_alone: bool) -> Iterator[tuple[str, Any, str, bool]]:
    """(keyword, schema or list of schemas, JSON pointer, whether nothing is merged with it), for each within."""
    for name in MAPPINGS:
        if isinstance(schema.get(name), dict):
            for key, inner in schema[name].items():
                yield name, inner, f"{place}/{name}/{key.replace('~', '~0').replace('/', '~1')}", True
    for name in VALUES:
        if name in schema:
            yield name, schema[name], f"{place}/{name}", True
    alone = is_alone and not _has_own(schema)
    for name in ALTERNATIVES:
        if name in schema:
            yield name, schema[name], f"{place}/{name}", alone and sum(other in schema for other in _BESIDE) == 1
    if isinstance(schema.get("allOf"), list):
        only = len(schema["allOf"]) == 1 and sum(other in schema for other in _BESIDE) == 1
        yield "allOf", schema["allOf"], f"{place}/allOf", alone and only
    for name in ("then", "else"):
        if name in schema:
            yield name, schema[name], f"{place}/{name}", False


_BESIDE = (*ALTERNATIVES, *MERGED, "$ref")


def _has_own(schema: dict[str, Any]) -> bool:
    return "properties" in schema or "patternProperties" in schema


def _merges(schema: dict[str, Any]) -> bool:
    """Whether other schemas add to what this one says of the same value."""
    return any(name in schema for name in _BESIDE)


def _merged_refs(schema: Any, open_refs: frozenset[str], place: str, *, is_alone: bool = True) -> Iterator[Any]:
    """The references whose schemas are merged with others."""
    if isinstance(schema, list):
        for one in schema:
            yield from _merged_refs(one, open_refs, place, is_alone=is_alone)
    if not isinstance(schema, dict):
        return
    is_alone = is_alone and place not in open_refs
    if "$ref" in schema:
        beside = _has_own(schema) or sum(other in schema for other in _BESIDE) > 1
        if beside or not is_alone:
            yield schema["$ref"]
    for _, inner, inner_place, stands_alone in _inner(schema, place, is_alone=is_alone):
        yield from _merged_refs(inner, open_refs, inner_place, is_alone=stands_alone)
