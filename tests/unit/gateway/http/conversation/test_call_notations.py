"""Demanded calls in the notations that are no JSON: what the grammar allows, and the parser reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.gateway.http.conversation.call_grammar import any_calls, named_call
from services.gateway.http.conversation.objects import FunctionBody
from services.gateway.http.parsing.reading.parts import CallArguments, CallBegun, CallFormat
from services.gateway.http.parsing.registry import TOOL_PARSERS, make_tool_parser
from shared.automata.automaton import make_automaton
from shared.automata.compiling import Compiler
from shared.automata.vocabulary import load_vocabulary
from shared.text.tokenization import load_tokenizer
from tests.integration.engine import MODEL
from tests.unit.gateway.http.client import http
from tests.unit.gateway.http.requests.test_formats import CLOCK, PARSERS, accepts
from tests.unit.gateway.troupe import LAST

BARE = tuple(name for name in TOOL_PARSERS if name not in PARSERS)  # names are no JSON strings there
MEETING = FunctionBody(
    name="meet",
    parameters={
        "type": "object",
        "properties": {"with": {"type": "string"}, "day": {"enum": ["Monday", "Friday"]}, "hours": {"type": "integer"},
                       "where": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "required": ["with", "hours"],
    },
)  # fmt: skip
MEETINGS: list[dict[str, object]] = [
    {"with": 'Ann: "you"', "day": "Friday", "hours": 2, "where": None},
    {"with": "a, b", "hours": 10},
    {"with": "", "hours": 0},
]


@pytest.mark.parametrize("name", BARE)
def test_a_demanded_call_in_every_notation_is_what_its_parser_reads(name: str) -> None:
    parameters = MEETING.parameters
    parser = make_tool_parser(name, {"meet": parameters or {}})
    assert parser is not None
    form = parser.form
    grammar = named_call(form, MEETING)
    either = any_calls(form, [MEETING, CLOCK], parallel=True)
    for arguments in MEETINGS:
        text = in_form(form, arguments) + form.after + form.end
        assert accepts(grammar, text), text
        first, second = form.head("meet", 11), form.head("clock", 12)
        whole = f"{first}{in_form(form, arguments)}{form.after}{form.again}{second}"
        whole += ("{}" if form.style is None else "") + form.after + form.end
        assert accepts(either, whole), whole
        made = make_tool_parser(name, {"meet": parameters or {}})
        assert made is not None
        parts = [*made.feed(form.begin + whole), *made.finish()]
        calls = [part.name for part in parts if isinstance(part, CallBegun)]
        given = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert calls == ["meet", "clock"] and json.loads(given.removesuffix("{}")) == arguments
    assert not accepts(grammar, in_form(form, {"with": "a"}) + form.after + form.end), "hours are required"


@pytest.mark.parametrize("odd", [None, True, 5, "a", [["with"], {"with": 1}]])
@pytest.mark.parametrize("name", BARE)
def test_what_is_no_list_demands_nothing(name: str, odd: object) -> None:
    parser = make_tool_parser(name, {})
    assert parser is not None
    properties = {"with": {"type": "string", "enum": odd}}
    function = FunctionBody(name="meet", parameters={"type": "object", "properties": properties, "required": odd})
    for grammar in (named_call(parser.form, function), any_calls(parser.form, [function], parallel=True)):
        assert "with" in grammar.text or parser.form.style is None


def in_form(form: CallFormat, arguments: dict[str, object]) -> str:
    """Arguments as a format has them."""
    style = form.style
    if style is None:
        return json.dumps(arguments)
    items = []
    for key, value in arguments.items():
        if isinstance(value, str) and style.text_ends and key in ("with", "day"):
            items.append(f"{style.before_key}{key}{style.before_text}{value}{style.after_text}")
        else:
            items.append(f"{style.before_key}{key}{style.before_value}{json.dumps(value)}{style.after_value}")
    return style.between.join(items)


def test_a_tag_that_is_a_token_may_be_written_in_a_format(tmp_path: Path) -> None:
    """Qwen's `</tool_call>` is a token of its own, and no special one: a call that has to end with it can end."""
    content = json.loads((MODEL / "tokenizer.json").read_text())
    size = load_tokenizer(MODEL).vocab_size
    tag = {"id": size, "content": "</tool_call>", "special": False, "single_word": False, "lstrip": False,
           "rstrip": False, "normalized": False}  # fmt: skip
    content["added_tokens"].append(tag)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    vocabulary = load_vocabulary(tmp_path, size + 1, [0])
    parser = make_tool_parser("hermes")
    assert parser is not None
    following = make_automaton(vocabulary, Compiler().compile(named_call(parser.form, CLOCK)))
    ids = load_tokenizer(MODEL).encode_plain("{}}\n")
    assert following.num_valid([*ids, size, 0]) == len(ids) + 2
    following.advance(ids)
    allowed = following.allowed()
    assert allowed[size] and not allowed[0]
    following.advance([size])
    assert following.allowed()[0]


HAS: dict[str, object] = {"type": "object", "properties": {}}
TWICE: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": one, "function": {"name": "meet"}} for one in "ab"]},
            *({"role": "tool", "tool_call_id": one, "content": "no"} for one in "ab"),
        ],
        "tools": [{"type": "function", "function": {"name": "meet", "parameters": HAS}}],
        "tool_choice": {"type": "function", "function": {"name": "meet"}},
    },
    "/v1/responses": {
        "input": [
            *({"type": "function_call", "call_id": one, "name": "meet", "arguments": "{}"} for one in "ab"),
            *({"type": "function_call_output", "call_id": one, "output": "no"} for one in "ab"),
        ],
        "tools": [{"type": "function", "name": "meet", "parameters": HAS}],
        "tool_choice": {"type": "function", "name": "meet"},
    },
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": one, "name": "meet"} for one in "ab"]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": one, "content": "no"} for one in "ab"]},
        ],
        "tools": [{"name": "meet", "input_schema": HAS}],
        "tool_choice": {"type": "tool", "name": "meet"},
    },
}


@pytest.mark.parametrize("path", TWICE)
async def test_a_named_call_has_the_number_of_calls_before_it_where_the_format_counts_them(path: str) -> None:
    async with http(tool_call_parser="kimi_k2") as h:
        asked = h.post(path, TWICE[path])
        request = await h.troupe.request()
        assert request.chat_options is not None
        assert request.chat_options.opening.endswith("functions.meet:2<|tool_call_argument_begin|>")
        h.troupe.say(request, "{}<|tool_call_end|><|tool_calls_section_end|>", **LAST)
        response = await asked
        assert response.status_code == 200 and '"meet"' in response.text
