"""Formats of the output in HTTP's bodies: what the tokenizer is asked, and calls of tools as grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.http.conversation.call_grammar import any_calls, named_call
from services.gateway.http.conversation.objects import FunctionBody
from services.gateway.http.parsing.reading.parts import CallArguments, CallBegun
from services.gateway.http.parsing.registry import make_tool_parser
from shared.automata.automaton import Automaton, make_automaton
from shared.automata.compiling import Compiler
from shared.automata.vocabulary import load_vocabulary
from shared.messages import FinishReason
from shared.requests.grammar import Grammar, GrammarKind
from shared.text.tokenization import load_tokenizer
from tests.integration.engine import MODEL
from tests.unit.gateway.http.client import http
from tests.unit.gateway.troupe import LAST

ASK = {"prompt": "Once"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
ASKED: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_OBJECT, "", "response_format")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        Grammar(GrammarKind.JSON_SCHEMA, TEXT, "response_format"),
    ),
    ({"guided_json": SCHEMA}, Grammar(GrammarKind.JSON_SCHEMA, TEXT, "guided_json")),
    ({"guided_json": TEXT}, Grammar(GrammarKind.JSON_SCHEMA, TEXT, "guided_json")),
    ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+", "guided_regex")),
    ({"guided_choice": ["x", "y"]}, Grammar(GrammarKind.CHOICE, '["x","y"]', "guided_choice")),
    ({"guided_grammar": "start: /a/"}, Grammar(GrammarKind.GRAMMAR, "start: /a/", "guided_grammar")),
    (
        {"structured_outputs": {"regex": "a+", "json": None, "disable_any_whitespace": True}},
        Grammar(GrammarKind.REGEX, "a+", "structured_outputs"),
    ),
    ({"structured_outputs": {"json_object": True}}, Grammar(GrammarKind.JSON_OBJECT, "", "structured_outputs")),
]


@pytest.mark.parametrize(("given", "grammar"), ASKED, ids=range(len(ASKED)))
async def test_what_the_tokenizer_is_asked(given: dict[str, Any], grammar: Grammar) -> None:
    async with http() as h:
        asked = h.post("/v1/completions", ASK | given)
        request = await h.troupe.request()
        assert request.params.grammar == grammar
        h.troupe.say(request, "x", **LAST)
        assert (await asked).status_code == 200


async def test_text_is_no_format_and_responses_have_one_too() -> None:
    async with http() as h:
        plain = h.post("/v1/completions", ASK | {"response_format": {"type": "text"}})
        request = await h.troupe.request()
        assert request.params.grammar is None
        h.troupe.say(request, "x", **LAST)
        await plain
        form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
        asked = h.post("/v1/responses", {"input": "Hi", "text": {"format": form}})
        request = await h.troupe.request()
        assert request.params.grammar == Grammar(GrammarKind.JSON_SCHEMA, TEXT, "text.format")
        h.troupe.say(request, "{}", **LAST)
        assert (await asked).json()["text"] == {"format": form}


WEATHER = FunctionBody(name="weather", parameters={"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                                                   "required": ["city"], "additionalProperties": False})  # fmt: skip
CLOCK = FunctionBody(name="clock")
PARSERS = ("hermes", "llama3_json", "mistral", "phi4_mini_json")


def automaton(grammar: Grammar) -> Automaton:
    tokenizer = load_tokenizer(MODEL)
    vocabulary = load_vocabulary(MODEL, tokenizer.vocab_size, [0])
    return make_automaton(vocabulary, Compiler().compile(grammar))


def accepts(grammar: Grammar, text: str) -> bool:
    ids = load_tokenizer(MODEL).encode_plain(text)
    return automaton(grammar).num_valid([*ids, 0]) == len(ids) + 1


@pytest.mark.parametrize("name", PARSERS)
def test_a_demanded_call_is_what_its_parser_reads(name: str) -> None:
    parser = make_tool_parser(name)
    assert parser is not None
    form, city = parser.form, '{"city": "Rome"}'
    one = f'"weather"{form.middle}{city}{form.after}'
    two = f'{one}{form.again}"clock"{form.middle}{{}}{form.after}'
    grammar = any_calls(form, [WEATHER, CLOCK], parallel=True)
    assert accepts(grammar, one + form.end) and accepts(grammar, two + form.end)
    assert not accepts(grammar, one.replace("Rome", "Bonn") + form.end)
    assert not accepts(grammar, one.replace("weather", "wether") + form.end)
    assert not accepts(any_calls(form, [WEATHER, CLOCK], parallel=False), two + form.end)
    parts = [*parser.feed(form.begin + two + form.end), *parser.finish()]
    assert [part.name for part in parts if isinstance(part, CallBegun)] == ["weather", "clock"]
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == city + "{}"


@pytest.mark.parametrize("name", PARSERS)
def test_a_named_call_has_that_function_s_arguments(name: str) -> None:
    parser = make_tool_parser(name)
    assert parser is not None
    grammar, end = named_call(parser.form, WEATHER), parser.form.after + parser.form.end
    assert accepts(grammar, '{"city": "Oslo"}' + end) and not accepts(grammar, "{}" + end)
    parts = [*parser.feed(parser.opening("weather") + '{"city": "Oslo"}' + end), *parser.finish()]
    assert parts[0] == CallBegun("weather") and "Oslo" in str(parts[1:])


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "phi4_mini_json"])
def test_a_call_behind_reasoning_has_its_opening_in_the_format(name: str) -> None:
    parser = make_tool_parser(name)
    assert parser is not None
    form, rest = parser.form, '{"city": "Oslo"}' + parser.form.after + parser.form.end
    named = named_call(form, WEATHER, opening=parser.opening("weather"))
    any_one = any_calls(form, [WEATHER, CLOCK], parallel=True, opening=form.begin)
    for grammar in (named, any_one):
        for gap in ("", "\n\n"):
            assert accepts(grammar, gap + parser.opening("weather") + rest)
        assert not accepts(grammar, rest) and not accepts(grammar, f"Well: {parser.opening('weather')}{rest}")
    assert not accepts(named, parser.opening("clock") + "{}" + form.after + form.end)


async def test_required_begins_the_call_and_answers_with_it() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER.parameters}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "tool_choice": "required"}
    async with http(tool_call_parser="hermes") as h:
        asked = h.post("/v1/chat/completions", body)
        request = await h.troupe.request()
        assert request.chat_options is not None and request.chat_options.opening == '<tool_call>\n{"name": '
        grammar = request.params.grammar
        assert grammar is not None and grammar.kind is GrammarKind.GRAMMAR and grammar.field == "tools"
        text = '"weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        assert accepts(grammar, text)
        h.troupe.say(request, text, **{**LAST, "finish_reason": FinishReason.STOP})
        choice = (await asked).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert choice["finish_reason"] == "tool_calls"
