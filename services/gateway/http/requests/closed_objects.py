"""Objects of a JSON schema that have their named properties and no others, where the schema does not say.

JSON schema lets any further property come; clients that make schemas of functions and classes seldom say otherwise.  A
small model that is held to such a schema adds properties for ever.  What says `additionalProperties`, whatever it says,
is left as it is, and so is an object that names no property: that is a mapping.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from services.gateway.http.parsing.reading.values import resolved

VALUES = ("items", "contains", "additionalProperties", "unevaluatedProperties", "additionalItems", "prefixItems")
MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
ALTERNATIVES = ("anyOf", "oneOf")
CONDITIONAL = ("then", "else")
MERGED = ("allOf", "if", *CONDITIONAL, "not", "dependentSchemas", "dependencies", "$dynamicRef")
BESIDE = frozenset({*ALTERNATIVES, *MERGED, "$ref"})  # other schemas add to what this one says of the same value
DECIDED = ("additionalProperties", "unevaluatedProperties")
WITHIN = frozenset({*VALUES, *ALTERNATIVES, *CONDITIONAL})


def closed(schema: Any) -> Any:
    """A copy of a schema in which objects are closed, within each other too.

    Schemas that are merged with others (`allOf` of several, a `$ref` beside `properties` ...) stay open, since each of
    them would forbid the properties of the others.  Takes time in proportion to the schema: each object is seen twice
    at most.
    """
    schema = json.loads(json.dumps(schema))  # no object is there twice, as in a deep copy it might be
    objects = list(_objects(schema))
    merged = [other for one in objects for other in _merged(one, schema, is_open=False)]
    open_ids: set[int] = set()  # objects that others are merged with
    while merged:  # what an open schema refers to is open too
        one = merged.pop()
        if id(one) not in open_ids:
            open_ids.add(id(one))
            merged += _merged(one, schema, is_open=True)
    for one in objects:
        if not isinstance(one.get("properties"), dict) or id(one) in open_ids:
            continue
        if one.keys().isdisjoint(DECIDED) and one.keys().isdisjoint(BESIDE):
            one["additionalProperties"] = False
    return schema


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema that is an object and says something."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict) and one:
            yield one
            waiting += _inner(one)


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas, or lists of schemas, within one."""
    for name, inner in schema.items():
        if name in MAPPINGS:
            if isinstance(inner, dict):
                yield from inner.values()
        elif name in WITHIN or (name == "allOf" and isinstance(inner, list)):
            yield inner


def _merged(schema: dict[str, Any], root: Any, *, is_open: bool) -> Iterator[dict[str, Any]]:
    """The schemas that `schema` merges with others, as far as it is known by itself; `is_open`: it is merged itself."""
    if (count := len(BESIDE.intersection(schema))) == 0:
        return
    is_shared = is_open or count > 1 or "properties" in schema or "patternProperties" in schema
    parts = [schema.get(name) for name in CONDITIONAL]
    if is_shared:
        parts += [schema.get(name) for name in ALTERNATIVES]
        ref = schema.get("$ref")
        if isinstance(ref, str) and isinstance(other := resolved(ref, root), dict):
            yield other
    if isinstance(several := schema.get("allOf"), list) and (is_shared or len(several) > 1):
        parts.append(several)
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            yield part
