"""Parsers of calls and reasoning: known texts by their parts, and any text the same however it is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from services.gateway.http.parsing.reading.calls import CallParser
from services.gateway.http.parsing.reading.parts import CallArguments, CallBegun, Content, Part, Reasoning
from services.gateway.http.parsing.registry import (
    HARMONY,
    TOOL_PARSERS,
    OutputParser,
    make_reasoning_parser,
    make_tool_parser,
)
from tests.unit.gateway.http.parsing.writers import SCHEMAS, WORDS, answer

NUM_SPLITS = 10_000


def parser(tools: str = "", reasoning: str = "") -> OutputParser:
    return OutputParser(make_reasoning_parser(reasoning), make_tool_parser(tools, SCHEMAS))


def read(made: OutputParser, pieces: Iterable[str]) -> list[Part]:
    parts = [part for piece in pieces for part in made.feed(piece)] + made.finish()
    return joined(parts)


def joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind as one: what a client has when it has added up the deltas."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, CallBegun) or type(last) is not type(part):
            found.append(part)
        else:
            assert not isinstance(last, CallBegun | None)
            found[-1] = type(part)(last.text + part.text)
    return found


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


CITY = '{"city": "北京", "note": "a \\"b\\" {c} </tool_call> 🦊"}'
KNOWN = [
    ("hermes", "Just words.", [Content("Just words.")]),
    ("hermes", "1 < 2 <tool", [Content("1 < 2 <tool")]),
    (
        "hermes",
        f'Let me see. \n<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>\n',
        [Content("Let me see."), CallBegun("weather"), CallArguments(CITY)],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": [1, {"b": null}]}, "id": 7, "name": "f"}</tool_call>'
        '<tool_call>{"name": "g"}}</tool_call> Done. ',
        [
            CallBegun("f"), CallArguments('{"a": [1, {"b": null}]}'),
            CallBegun("g"), CallArguments("{}"), Content("Done. "),
        ],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [CallBegun("f"), CallArguments('{"a": 1}')],
    ),
    ("hermes", "<tool_call>not JSON</tool_call>", [Content("<tool_call>not JSON</tool_call>")]),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
     [Content('<tool_call>{"name": 5, "arguments": {}}</tool_call>')]),
    ("hermes", '<tool_call>{"name": "f", "argu', [Content('<tool_call>{"name": "f", "argu')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut o', [CallBegun("f"), CallArguments('{"a": "cut o')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {} oops </tool_call>ok',
     [CallBegun("f"), CallArguments("{}"), Content("ok")]),
    ("llama3_json", "Hello { there", [Content("Hello { there")]),
    ("llama3_json", ' {"name": "f", "parameters": {"x": 1}}', [CallBegun("f"), CallArguments('{"x": 1}')]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"type": "function", "name": "g", "parameters": {}}',
        [CallBegun("f"), CallArguments('{"x": 1}'), CallBegun("g"), CallArguments("{}")],
    ),
    ("llama3_json", '{"name": "Lily", "age": 3}', [Content('{"name": "Lily", "age": 3}')]),
    ("llama3_json", "<|python_tag|>print(1)", [Content("<|python_tag|>print(1)")]),
    (
        "llama3_json", '{"name": "f", "parameters": {}}\nThat was it.',
        [CallBegun("f"), CallArguments("{}"), Content("That was it.")],
    ),
    ("mistral", "Nothing [TOOL", [Content("Nothing [TOOL")]),
    (
        "mistral",
        'Sure. [TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        [Content("Sure."), CallBegun("f"), CallArguments('{"a": "]"}'), CallBegun("g"), CallArguments("{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc123[ARGS]{}',
        [CallBegun("f"), CallArguments('{"a": 1}'), CallBegun("g"), CallArguments("{}")],
    ),
    ("mistral", '[TOOL_CALLS]get_time{"tz": "UTC"}', [CallBegun("get_time"), CallArguments('{"tz": "UTC"}')]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', [CallBegun("f"), CallArguments("{}")]),
    ("mistral", "[TOOL_CALLS] not a call {", [Content("[TOOL_CALLS] not a call {")]),
    ("mistral", "[TOOL_CALLS][1, 2]", [Content("[TOOL_CALLS][1, 2]")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "parts"), KNOWN, ids=range(len(KNOWN)))
def test_what_is_in_a_text(name: str, text: str, parts: list[Part]) -> None:
    assert read(parser(name), [text]) == parts
    assert read(parser(name), text) == parts, "character by character"


THOUGHTS = [
    ("qwen3", "<think>\nhm, 北京\n</think>\n\nYes.", [Reasoning("hm, 北京"), Content("Yes.")]),
    ("qwen3", "No thought </think> at all", [Content("No thought </think> at all")]),
    ("qwen3", "  <think>cut off </thi", [Reasoning("cut off </thi")]),
    ("qwen3", "<think></think>Yes", [Content("Yes")]),
    ("qwen3", "<thin", [Content("<thin")]),
    ("deepseek_r1", "so it goes\n</think>\nYes. </think>", [Reasoning("so it goes"), Content("Yes. </think>")]),
    ("deepseek_r1", "<think>so\n\n it goes</think>Yes", [Reasoning("so\n\n it goes"), Content("Yes")]),
    ("deepseek_r1", "never ends ", [Reasoning("never ends")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "parts"), THOUGHTS, ids=range(len(THOUGHTS)))
def test_what_is_thought(name: str, text: str, parts: list[Part]) -> None:
    assert read(parser(reasoning=name), [text]) == parts
    assert read(parser(reasoning=name), text) == parts


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_every_cut_of_every_answer_gives_what_was_written(name: str) -> None:
    """Ten thousand cuts in all, over texts whose calls and thoughts are known; CJK, emoji and quotes within them."""
    rng = random.Random(name)
    num_calls = 0
    for _ in range(NUM_SPLITS // len(TOOL_PARSERS) + 1):
        text, thought, calls = answer(name, rng)
        parts = read(parser(name, "qwen3"), cut(text, rng))
        assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == thought, text
        assert [part.name for part in parts if isinstance(part, CallBegun)] == [called for called, _ in calls], text
        found = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
        assert found == [given for _, given in calls], text
        num_calls += len(calls)
    assert num_calls > NUM_SPLITS // len(TOOL_PARSERS)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    '{"name": ', '"f"', ', "arguments": ', ', "parameters": ', "{", "}", "[", "]", '"', "\\", ",", ";", ":", " ", "\n",
    "null", "12", "true", "f", "functools", "<function=", "<parameter=", ">", "</parameter>", "</function>",
    "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function",
    "<｜tool▁sep｜>", "```json", "<｜tool▁call▁end｜>", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="',
    '<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>", "<|channel|>",
    "analysis",
    "commentary to=functions.f", "final", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<start_function_call>",
    "call:f{", "<escape>", "<end_function_call>", "<|tool_call>", '<|"|>', "<tool_call|>", "(", ")", "a=", "'", *WORDS,
]  # fmt: skip


def damaged(text: str, rng: random.Random) -> str:
    """A few fragments put in, a few characters taken out."""
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice([rng.choice(FRAGMENTS), ""]) + text[place + rng.randrange(3) :]
    return text


READERS = [
    *((name, reasoning) for name in ("", *TOOL_PARSERS) for reasoning in ("", "qwen3", "deepseek_r1")),
    *(("hermes", reasoning) for reasoning in ("kimi_k2", "gemma4", "openai_gptoss")),
]


@pytest.mark.parametrize(("name", "reasoning"), READERS)
def test_any_text_at_all_is_read_the_same_however_it_is_cut(name: str, reasoning: str) -> None:
    rng = random.Random(f"{name} {reasoning}")
    kinds = set()
    for number in range(NUM_SPLITS // 25):
        text = "".join(rng.choices(FRAGMENTS, k=rng.randrange(1, 25)))
        if number % 2:
            text = damaged(
                answer(name or "hermes", rng)[0].removeprefix("" if reasoning else "<think>\n\n</think>\n\n"), rng
            )
        whole = read(parser(name, reasoning), [text])
        assert read(parser(name, reasoning), cut(text, rng)) == whole, text
        assert read(parser(name, reasoning), text) == whole, text
        kinds |= {type(part) for part in whole}
    assert CallBegun in kinds or not name or reasoning == "openai_gptoss"
    assert Reasoning in kinds or not reasoning or reasoning in ("gemma4", "openai_gptoss")
    assert name or CallBegun not in kinds
    assert reasoning or name == HARMONY or Reasoning not in kinds


QUOTED = [name for name in TOOL_PARSERS if make_tool_parser(name).form.quoted]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", QUOTED)
def test_a_call_that_was_begun_for_the_model_goes_on_from_there(name: str) -> None:
    made = make_tool_parser(name)
    assert made is not None
    opening = made.opening('say "hi"')
    assert made.feed(opening) == []
    parts = joined([*made.feed('{"a": 1}}'), *made.finish()])
    assert parts[:2] == [CallBegun('say "hi"'), CallArguments('{"a": 1}')]


@pytest.mark.parametrize("name", QUOTED)
def test_arguments_stream_as_they_are_written(name: str) -> None:
    made: CallParser | None = make_tool_parser(name)
    assert made is not None
    made.feed(made.opening("f"))
    assert made.feed('{"text": "so ') == [CallBegun("f"), CallArguments('{"text": "so ')]
    assert made.feed("far") == [CallArguments("far")]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "unit",
    [
        '<tool_call>{"name": ',
        "{",
        '{"name": "f", "arguments": {"',
        "[TOOL_CALLS]",
        "< ",
        " ",
        "<function=f><parameter=a>",
        "<|channel|>",
        "f(a=[",
        "call:f{a:{",
    ],
)
@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_long_hostile_text_comes_to_an_end(name: str, unit: str) -> None:
    """In pieces as tokens are: what took time with the square of the text would take minutes."""
    made = parser(name, "qwen3")
    assert [part for _ in range(20_000) for part in made.feed(unit)] + made.finish()
