"""Real JSON schemas for tests, and bounds that let a model without sense come to an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

LONGEST_STRING = 8
MOST_ITEMS = 2
FREE_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


class NamedSchema(msgspec.Struct, frozen=True):
    name: str
    schema: dict[str, Any]


def read_schemas(data_dir: Path) -> list[NamedSchema]:
    lines = (data_dir / "schemas" / "jsonschemabench-320.jsonl").read_text(encoding="utf-8").splitlines()
    return [msgspec.convert(json.loads(line), NamedSchema) for line in lines]


def bounded(schema: Any) -> Any:
    """The schema with short strings, few items and small numbers, wherever it allows them: what fits it fits the
    original too."""
    if isinstance(schema, list):
        return [bounded(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in ("enum", "const", "default", "examples") else bounded(value)
             for key, value in schema.items()}  # fmt: skip
    kind = schema.get("type")
    if kind == "string" and not {"enum", "const", "pattern", "format"} & schema.keys():
        found["maxLength"] = _least(schema, "maxLength", "minLength", LONGEST_STRING)
    if kind == "array":
        found["maxItems"] = _least(schema, "maxItems", "minItems", MOST_ITEMS)
    if kind == "integer" and not (FREE_NUMBERS | {"enum", "const"}) & schema.keys():
        found |= {"minimum": -1000, "maximum": 1000}
    return found


def _least(schema: dict[str, Any], most: str, least: str, usual: int) -> int:
    shortest: int = min(schema.get(most, 1 << 30), max(usual, schema.get(least, 0)))
    return shortest
