"""Objects of schemas that do not say what else may come: closed in tools, on demand elsewhere.

`clients.json` has what langchain-openai 1.4.3 and instructor 1.17.0 send (with openai 2.54.0 and pydantic 2.14.3) for a
function and for classes with nested, optional and listed fields: what their HTTP client was given, without messages.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from services.gateway.http.conversation.call_grammar import any_calls, named_call
from services.gateway.http.conversation.objects import FunctionBody
from services.gateway.http.parsing.registry import make_tool_parser
from services.gateway.http.requests.closed_objects import closed
from shared.automata.automaton import Automaton, make_automaton
from shared.automata.compiling import Compiler
from shared.automata.vocabulary import load_vocabulary
from shared.errors import RequestError
from shared.requests.grammar import Grammar, GrammarKind
from shared.text.tokenization import load_tokenizer
from tests.integration.engine import MODEL
from tests.unit.gateway.http.client import http
from tests.unit.gateway.troupe import LAST

SENT: dict[str, Any] = json.loads(Path(__file__).with_name("clients.json").read_text(encoding="utf-8"))
TOOLS = {name: body["tools"][0]["function"] for name, body in SENT.items() if "tools" in body}
TOKENIZER = load_tokenizer(MODEL)
NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = NAMED | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMED, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        (NAMED | {"additionalProperties": True}, NAMED | {"additionalProperties": True}),
        (NAMED | {"additionalProperties": NAMED}, NAMED | {"additionalProperties": CLOSED}),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": CLOSED}),
        ({"type": "array", "prefixItems": [NAMED, True]}, {"type": "array", "prefixItems": [CLOSED, True]}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [NAMED], "title": "x"}, {"allOf": [CLOSED], "title": "x"}),
        ({"allOf": [NAMED, NAMED]}, {"allOf": [NAMED, NAMED]}),
        (NAMED | {"anyOf": [NAMED]}, NAMED | {"anyOf": [NAMED]}),
        (NAMED | {"patternProperties": {"x/~": NAMED}}, CLOSED | {"patternProperties": {"x/~": CLOSED}}),
        ({"not": NAMED}, {"not": NAMED}),
        ({"properties": {"properties": NAMED}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
        ({"enum": [{"properties": {}}], "const": {"properties": {}}, "default": NAMED},
         {"enum": [{"properties": {}}], "const": {"properties": {}}, "default": NAMED}),
        ({"$ref": "#/$defs/N", "$defs": {"N": NAMED}}, {"$ref": "#/$defs/N", "$defs": {"N": CLOSED}}),
        ({"allOf": [{"$ref": "#/$defs/N"}, {"type": "object"}], "$defs": {"N": NAMED, "M": NAMED}},
         {"allOf": [{"$ref": "#/$defs/N"}, {"type": "object"}], "$defs": {"N": NAMED, "M": CLOSED}}),
        ({"allOf": [{"$ref": "#/$defs/A"}, {}], "$defs": {"A": {"$ref": "#/$defs/N"}, "N": NAMED}},
         {"allOf": [{"$ref": "#/$defs/A"}, {}], "$defs": {"A": {"$ref": "#/$defs/N"}, "N": NAMED}}),
        (True, True),
        ({"properties": 5, "items": None, "$defs": [], "allOf": {}, "$ref": 7}, {"properties": 5, "items": None,
         "$defs": [], "allOf": {}, "$ref": 7}),
    ],
)  # fmt: skip
def test_what_is_closed_and_what_is_not(schema: Any, expected: Any) -> None:
    before = copy.deepcopy(schema)
    assert closed(schema) == expected
    assert schema == before, "the client's own is left as it was: the template shows it"


def automaton(grammar: Grammar) -> Automaton:
    size = TOKENIZER.vocab_size
    return make_automaton(load_vocabulary(MODEL, size, [0]), Compiler().compile(grammar))


def takes(grammar: Grammar, text: str) -> bool:
    ids = TOKENIZER.encode_plain(text)
    return automaton(grammar).num_valid(ids) == len(ids)


ARGUMENTS = {
    "langchain tool": '{"address": {"street": "Low", "number": 5}',
    "langchain class": '{"age": null, "mood": "good", "address": {"street": "Low", "number": 5}',
    "instructor class": '{"age": 7, "mood": "good", "address": {"street": "Low", "number": 5}',
}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_a_call_of_what_the_packages_send_ends_with_its_properties(name: str) -> None:
    parser = make_tool_parser("hermes")
    assert parser is not None
    function = FunctionBody(**TOOLS[name])
    is_open = named_call(parser.form, function, closes=False)
    is_closed = named_call(parser.form, function)
    text = ARGUMENTS[name]
    nested = text[:-1] + ', "more": 1}}'
    for more in (text + ', "more": 1}', nested):
        assert takes(is_open, more), "this is why models run away"
        assert not takes(is_closed, more)
    assert takes(is_closed, text + "}")
    either = any_calls(parser.form, [function], parallel=True)
    begun = json.dumps(function.name) + parser.form.middle
    assert takes(either, begun + text + "}") and not takes(either, begun + nested)


def test_a_mapping_that_says_so_stays_open() -> None:
    parser = make_tool_parser("hermes")
    assert parser is not None
    mapping = {"type": "object", "additionalProperties": {"type": "string"}}
    schema = {"type": "object", "properties": {"extra": mapping}}
    grammar = named_call(parser.form, FunctionBody(name="f", parameters=schema))
    assert takes(grammar, '{"extra": {"any": "z", "other": "w"}}') and not takes(grammar, '{"extra": {}, "more')


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_takes_none(parameters: Any) -> None:
    parser = make_tool_parser("hermes")
    assert parser is not None
    grammar = named_call(parser.form, FunctionBody(name="now", parameters=parameters))
    assert takes(grammar, "{}") and not takes(grammar, '{"a')


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": NAMED}}
ASKED: list[tuple[str, dict[str, Any], bool]] = [
    ("tools", {"response_format": FORMAT}, False),
    ("all", {"response_format": FORMAT}, True),
    ("all", {"guided_json": NAMED}, True),
    ("all", {"guided_json": json.dumps(NAMED)}, True),
    ("all", {"structured_outputs": {"json": NAMED}}, True),
    ("all", {"structured_outputs": {"json": NAMED, "disable_additional_properties": False}}, False),
    ("none", {"structured_outputs": {"json": NAMED, "disable_additional_properties": True}}, True),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "given", "is_closed"), ASKED)
async def test_formats_are_closed_where_the_setting_or_the_request_says_so(
    setting: str, given: dict[str, Any], is_closed: bool
) -> None:
    async with http(closed_objects=setting) as h:
        asked = h.post("/v1/completions", {"prompt": "Once"} | given)
        request = await h.troupe.request()
        assert request.params.grammar is not None and request.params.grammar.kind is GrammarKind.JSON_SCHEMA
        assert json.loads(request.params.grammar.text) == (CLOSED if is_closed else NAMED)
        h.troupe.say(request, "x", **LAST)
        assert (await asked).status_code == 200


@pytest.mark.parametrize("name", sorted(TOOLS))
async def test_the_tools_of_the_packages_reach_the_tokenizer_closed_and_the_template_as_they_are(name: str) -> None:
    for setting in ("tools", "none"):
        async with http(tool_call_parser="hermes", closed_objects=setting) as h:
            body = SENT[name] | {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
            asked = h.post("/v1/chat/completions", body)
            request = await h.troupe.request()
            assert request.params.grammar is not None and request.chat_options is not None
            assert ('"additionalProperties": false' in request.params.grammar.text) == (setting == "tools")
            assert json.loads(request.chat_options.tools) == body["tools"]
            h.troupe.say(request, "x", **LAST)
            assert (await asked).status_code == 200


def test_what_is_nested_too_deeply_is_a_refusal() -> None:
    parser = make_tool_parser("hermes")
    assert parser is not None
    schema: dict[str, Any] = {}
    for _ in range(900):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="nested too deeply"):
        named_call(parser.form, FunctionBody(name="f", parameters=schema))
