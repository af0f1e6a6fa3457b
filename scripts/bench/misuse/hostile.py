"""Grammars that are made to cost: deep, wide, ambiguous, explosive, or just long."""

from __future__ import annotations

import json
from typing import Any

Fields = dict[str, Any]  # of a `pageant.v1.Grammar`


def nested(depth: int, key: str) -> Fields:
    """Twice as much with every level."""
    schema: Fields = {"type": "string"}
    for _ in range(depth):
        schema = {key: [schema, {"type": "array", "items": schema}]}
    return schema


def hostile(salt: int) -> dict[str, Fields]:
    """By name; `salt` makes them others than those of another salt, so that nothing known of those helps."""
    one = f"s{salt}"
    patterns = {f"k{i}": {"pattern": f"(a|b)*a.{{{i}}}{one}"} for i in range(900)}
    doubling = "".join(f"x{i}: x{i + 1} x{i + 1}\n" for i in range(2000))
    return {
        "(a+)+b": {"regex": f"(a+)+b{one}"},
        "(a+)+ 900 times": {"regex": "(a+)+" * 900 + f"b{one}"},
        "counted twice": {"regex": f"(.{{1,1000}}){{1,1000}}{one}"},
        "counted three times": {"regex": f"((a{{0,1000}}){{0,1000}}){{0,1000}}{one}"},
        "Unicode classes": {"regex": r"(\p{L}|\p{N}){1,30000}" * 20 + one},
        "1 MB of regex": {"regex": "a|" * (1 << 19) + one},
        "oneOf, 10 deep": {"json_schema": json.dumps({"title": one} | nested(10, "oneOf"))},
        "anyOf, 9 deep": {"json_schema": json.dumps({"title": one} | nested(9, "anyOf"))},
        "allOf, 9 deep": {"json_schema": json.dumps({"title": one} | nested(9, "allOf"))},
        "items, 5000 deep": {"json_schema": '{"items":' * 5000 + json.dumps({"title": one}) + "}" * 5000},
        "5000 values": {"json_schema": json.dumps({"enum": [one + f"{i:x}" * 3 for i in range(5000)]})},
        "900 patterns": {"json_schema": json.dumps({"properties": patterns})},
        "1 MB of schema": {"json_schema": json.dumps({"enum": [one, "x" * (1 << 20)]})},
        "brackets, 5000 deep": {"grammar": "start: " + "(" * 5000 + f'"{one}"' + ")" * 5000},
        "doubled 2000 times": {"grammar": f'start: x0\n{doubling}x2000: "{one}"'},
        "ambiguous": {"grammar": f'start: a "{one}"\na: a a | "x" | '},
        "GBNF, 5000 deep": {"grammar": "root ::= " + "(" * 5000 + f'"{one}"' + ")" * 5000},
        "4096 choices": {"choice": [f"{one}{i}" * 2 for i in range(4096)]},
    }
