"""How long the schemas of demanded calls may be: whatever a client sends, walking it does not hold up others' streams.

No test measures time.  Without these bounds each of the walks would take minutes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.http.conversation.call_grammar import any_calls, named_call
from services.gateway.http.conversation.objects import FunctionBody
from services.gateway.http.parsing.reading.calls import CallParser
from services.gateway.http.parsing.reading.values import MAX_SCHEMAS, types_of
from services.gateway.http.parsing.registry import make_tool_parser
from services.gateway.http.requests.closed_objects import closed
from shared.errors import RequestError
from shared.requests.grammar import MAX_GRAMMAR_BYTES
from tests.unit.gateway.http.client import http
from tests.unit.gateway.troupe import LAST

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
LIMIT = f"MAX_GRAMMAR_BYTES={MAX_GRAMMAR_BYTES}"
TEXT: dict[str, Any] = {"type": "string"}


def parser(name: str) -> CallParser:
    made = make_tool_parser(name)
    assert made is not None
    return made


def tool(name: str, size: int) -> dict[str, Any]:
    """A function whose parameters have `size` bytes."""
    parameters = {"title": ""}
    parameters["title"] = "x" * (size - len(json.dumps(parameters, separators=(",", ":"))))
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
LONG: dict[str, Any] = CHAT | {"tools": [tool("f", 40), tool("g", MAX_GRAMMAR_BYTES + 1)]}
MANY: dict[str, Any] = CHAT | {"tools": [tool("f", 40_000), tool("g", 40_000)]}
G: dict[str, Any] = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(("body", "choice", "size"), [
    (LONG, "required", MAX_GRAMMAR_BYTES + 41), (LONG, G, MAX_GRAMMAR_BYTES + 1), (MANY, "required", 80_000),
])  # fmt: skip
@pytest.mark.parametrize("format_name", ["hermes", "qwen3_coder", "kimi_k2"])
async def test_parameters_of_a_demanded_call_have_a_limit_that_names_them(
    format_name: str, body: dict[str, Any], choice: Any, size: int
) -> None:
    async with http(tool_call_parser=format_name) as h:
        status, error = await h.refusal("/v1/chat/completions", body | {"tool_choice": choice})
        assert (status, error["param"]) == (400, "tools[1].function.parameters")
        assert f"{size} bytes" in error["message"] and LIMIT in error["message"]


@pytest.mark.parametrize(("body", "choice"), [
    (LONG, "auto"), (LONG, {"type": "function", "function": {"name": "f"}}), (MANY, G),
])  # fmt: skip
async def test_parameters_of_other_functions_may_be_longer(body: dict[str, Any], choice: Any) -> None:
    async with http(tool_call_parser="hermes") as h:
        asked = h.post("/v1/chat/completions", body | {"tool_choice": choice})
        h.troupe.say(await h.troupe.request(), "{}}\n</tool_call>", **LAST)
        assert (await asked).status_code == 200


@pytest.mark.parametrize("more", [0, 1])
def test_a_grammar_of_exactly_the_limit_is_whole(more: int) -> None:
    form = parser("hermes").form
    used = len(named_call(form, FunctionBody(name="f", parameters={"title": ""})).text)
    function = FunctionBody(name="f", parameters={"title": "x" * (MAX_GRAMMAR_BYTES - used + more)})
    if more:
        with pytest.raises(RequestError, match=LIMIT):
            named_call(form, function)
    else:
        text = named_call(form, function).text
        assert len(text) == MAX_GRAMMAR_BYTES and text.endswith("}")


def test_no_more_of_a_grammar_is_made_than_it_may_have() -> None:
    """A value that is no text has the schema's definitions beside it, each time: 1,500 times 30 KB."""
    definitions = {"long": {"title": "x" * 30_000}}
    properties: dict[str, Any] = {f"p{place}": {} for place in range(1500)}
    function = FunctionBody(name="f", parameters={"properties": properties, "$defs": definitions})
    form = parser("qwen3_coder").form
    with pytest.raises(RequestError, match=LIMIT):
        named_call(form, function)
    with pytest.raises(RequestError, match=LIMIT):
        any_calls(form, [function] * 2, parallel=True)


@pytest.mark.timeout(60)
def test_a_chain_of_definitions_is_walked_once() -> None:
    length = 20_000
    chain: dict[str, Any] = {f"d{place}": {"$ref": f"#/$defs/d{place + 1}"} for place in range(length)}
    chain |= {f"d{length}": NAMED, "other": NAMED}
    found = closed({"properties": {"a": {"properties": {}, "$ref": "#/$defs/d0"}}, "$defs": chain})
    assert found["$defs"][f"d{length}"] == NAMED, "its properties are merged with those of `a`"
    assert found["$defs"]["other"] == NAMED | {"additionalProperties": False}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("count", "beside", "expected"), [(200, [], None), (10, [TEXT], {"string"})])
def test_a_schema_that_refers_to_itself_again_and_again_is_seen_once(
    count: int, beside: list[Any], expected: set[str] | None
) -> None:
    own: list[Any] = [{"$ref": "#/$defs/x"} for _ in range(count)]
    assert types_of({"$ref": "#/$defs/x"}, {"$defs": {"x": {"anyOf": own + beside}}}) == expected


def test_types_are_looked_for_in_so_many_schemas() -> None:
    few: list[Any] = [{"type": f"t{place}"} for place in range(MAX_SCHEMAS - 2)]
    assert types_of({"anyOf": few}, {}) == frozenset(one["type"] for one in few)
    assert types_of({"anyOf": [*few, {}, {}]}, {}) is None


@pytest.mark.parametrize(("schema", "expected"), [
    ({"type": ["string", "null"]}, {"string", "null"}),
    ({"type": []}, None),
    ({"enum": ["a", 1, 1.5, True, None, [], {}]},
     {"string", "integer", "number", "boolean", "null", "array", "object"}),
    ({"const": "a"}, {"string"}),
    ({"oneOf": [{"anyOf": [TEXT, 5]}, {"allOf": [{"const": 1}]}, {"title": "x"}]}, {"string", "integer"}),
    ({"$ref": "#"}, {"object"}),
    ({"$ref": "#/$defs/a~1b"}, {"integer"}),
    ({"$ref": "#/$defs/no/where"}, None),
    ({"$ref": "other.json"}, None),
    (True, None),
])  # fmt: skip
def test_what_types_a_schema_allows(schema: Any, expected: set[str] | None) -> None:
    assert types_of(schema, {"type": "object", "$defs": {"a/b": {"type": "integer"}}}) == expected
