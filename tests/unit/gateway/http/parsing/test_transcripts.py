"""What models of 2026 write, as their templates and cards show it, and what it says."""

from __future__ import annotations

import json

import pytest

from services.gateway.http.parsing.reading.parts import CallArguments, CallBegun, Content, Part, Reasoning
from services.gateway.http.parsing.registry import OutputParser, make_reasoning_parser, make_tool_parser
from tests.unit.gateway.http.parsing.test_parsing import read

EDIT = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "line": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "force": {"type": "boolean"},
        "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/Place"},
    },
    "$defs": {"Place": {"type": "object"}},
}
SCHEMAS = {"edit": EDIT}
Call = tuple[str, dict[str, object]]
# format, reasoning, text, then what is thought, said and called
TRANSCRIPTS: list[tuple[str, str, str, str, str, list[Call]]] = [
    (
        "qwen3_coder", "",
        "I'll write the file.\n<tool_call>\n<function=edit>\n<parameter=path>\nsrc/main.py\n</parameter>\n"
        "<parameter=text>\ndef main():\n    if a < b:\n        return \"<b>\"\n\n</parameter>\n<parameter=line>\n12\n"
        "</parameter>\n<parameter=tags>\n[\"a\", 'b']\n</parameter>\n<parameter=force>\nTrue\n</parameter>\n"
        "<parameter=mode>\n5\n</parameter>\n<parameter=place>\n{'x': None}\n</parameter>\n</function>\n</tool_call>",
        "", "I'll write the file.",
        [("edit", {"path": "src/main.py", "text": 'def main():\n    if a < b:\n        return "<b>"\n', "line": 12,
                   "tags": ["a", "b"], "force": True, "mode": "5", "place": {"x": None}})],
    ),
    (
        "qwen3_coder", "qwen3",
        "<think>\nThe user wants two.\n</think>\n\n<tool_call>\n<function=a>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=b>\n<parameter=n>\n1.5\n</parameter>\n</function>\n</tool_call>",
        "The user wants two.", "", [("a", {}), ("b", {"n": 1.5})],
    ),
    ("qwen3_coder", "", "Use <tool_call> to call, as in <function= here", "",
     "Use <tool_call> to call, as in <function= here", []),
    (
        "glm45", "glm45",
        "<think>Let me look.</think>I will look it up.\n<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>/tmp/1"
        "</arg_value>\n<arg_key>line</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "Let me look.", "I will look it up.", [("edit", {"path": "/tmp/1", "line": 3})],
    ),
    ("glm45", "",
     "<tool_call>now</tool_call>\n<tool_call>edit<arg_key>text</arg_key><arg_value>7</arg_value></tool_call>",
     "", "", [("now", {}), ("edit", {"text": "7"})]),
    (
        "kimi_k2", "kimi_k2",
        "<think>Two calls</think><|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Beijing"}<|tool_call_end|><|tool_call_begin|>functions.a-b.c:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Two calls", "", [("get_weather", {"city": "Beijing"}), ("a-b.c", {})],
    ),
    (
        "kimi_k2", "kimi_k2",
        "<think>It goes straight on<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
        "It goes straight on", "", [("f", {"a": 1})],
    ),
    (
        "deepseek_v3", "deepseek_r1",
        "I need the weather.\n</think>\n\nChecking.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        'get_weather\n```json\n{"city": "Tokyo"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I need the weather.", "Checking.", [("get_weather", {"city": "Tokyo"}), ("now", {})],
    ),
    (
        "deepseek_v31", "",
        'Two.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": [1, {"y": "}"}]}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{\n  "z": null\n}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "", "Two.", [("f", {"x": [1, {"y": "}"}]}), ("g", {"z": None})],
    ),
    (
        "deepseek_v32", "deepseek_r1",
        "Hm.</think>On it.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"edit\">\n"
        '<｜DSML｜parameter name="text" string="true">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="line" string="false">12</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Hm.", "On it.", [("edit", {"text": "12", "line": 12}), ("now", {})],
    ),
    (
        "openai", "openai_gptoss",
        "<|channel|>analysis<|message|>User asks for weather. Use the tool.<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Tokyo"}<|call|>',
        "User asks for weather. Use the tool.", "", [("get_weather", {"city": "Tokyo"})],
    ),
    (
        "openai", "openai_gptoss",
        "<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "One moment. <|end|><|start|>assistant<|channel|>final<|message|>It is 2 < 3.",
        "Simple.", "One moment. It is 2 < 3.", [],
    ),
    ("openai", "", "<|start|>assistant to=functions.now<|channel|>commentary<|message|><|call|>",
     "", "", [("now", {})]),
    (
        "gemma4", "gemma4",
        "<|channel>thought\nLook it up.<channel|>Sure.<|tool_call>call:get_weather{city:<|\"|>Paris, France<|\"|>,"
        'days:3,o:{deep:[<|"|>a]b<|"|>,true,null]}}<tool_call|>',
        "Look it up.", "Sure.",
        [("get_weather", {"city": "Paris, France", "days": 3, "o": {"deep": ["a]b", True, None]}})],
    ),
    (
        "functiongemma", "",
        "<start_function_call>call:get_weather{location:<escape>San Francisco<escape>,n:2}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        "", "", [("get_weather", {"location": "San Francisco", "n": 2}), ("now", {})],
    ),
    (
        "llama4_pythonic", "",
        "<|python_start|>[register(name='Doe', age=9, address={'city': 'LA'}, role=None, ok=True, tags=['a', \"b'\"]), "
        "now()]<|python_end|>",
        "", "", [("register", {"name": "Doe", "age": 9, "address": {"city": "LA"}, "role": None, "ok": True,
                               "tags": ["a", "b'"]}), ("now", {})],
    ),
    ("llama4_pythonic", "", r"[f(a='Martha\'s \"way\"\n', b=(1, 2))]", "", "",
     [("f", {"a": 'Martha\'s "way"\n', "b": [1, 2]})]),
    ("llama4_pythonic", "", "[see(below)] for more", "", "[see(below)] for more", []),
    ("llama4_pythonic", "", "[1, 2, 3]", "", "[1, 2, 3]", []),
    (
        "phi4_mini_json", "",
        'Let me check.\nfunctools[{"name": "get_weather", "arguments": {"city": "Tokyo"}}, '
        '{"name": "now", "arguments": {}}]',
        "", "Let me check.", [("get_weather", {"city": "Tokyo"}), ("now", {})],
    ),
    ("phi4_mini_json", "", "import functools\nfunctools.reduce(f, [])", "",
     "import functools\nfunctools.reduce(f, [])", []),
]  # fmt: skip


def told(parts: list[Part]) -> tuple[str, str, list[Call]]:
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    said = "".join(part.text for part in parts if isinstance(part, Content))
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    arguments = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
    return thought, said, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize(("tools", "reasoning", "text", "thought", "said", "calls"), TRANSCRIPTS)
def test_a_transcript(tools: str, reasoning: str, text: str, thought: str, said: str, calls: list[Call]) -> None:
    def made() -> OutputParser:
        return OutputParser(make_reasoning_parser(reasoning), make_tool_parser(tools, SCHEMAS))

    assert told(read(made(), [text])) == (thought, said, calls)
    assert read(made(), text) == read(made(), [text]), "character by character"
    middle = len(text) // 2
    assert read(made(), [text[:middle], text[middle:]]) == read(made(), [text])


CUT_OFF = [
    ("qwen3_coder", "<tool_call>\n<function=edit>\n<parameter=path>\nsrc/ma", '{"path": "src/ma'),
    ("qwen3_coder", "<function=edit>\n<parameter=path>\na\n</parameter>", '{"path": "a"}'),
    ("glm45", "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a", '{"path": "a'),
    ("kimi_k2", '<|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>{"path": "a', '{"path": "a'),
    ("openai", '<|channel|>commentary to=functions.edit<|message|>{"path": "a', '{"path": "a'),
    ("gemma4", '<|tool_call>call:edit{path:<|"|>a', '{"path": "a'),
    ("llama4_pythonic", "[edit(path='a", '{"path": "a'),
]


@pytest.mark.parametrize(("name", "text", "arguments"), CUT_OFF)
def test_a_call_that_is_cut_off_has_what_was_written(name: str, text: str, arguments: str) -> None:
    made = OutputParser(None, make_tool_parser(name, SCHEMAS))
    assert read(made, text) == [CallBegun("edit"), CallArguments(arguments)]


def test_strings_stream_as_they_are_written() -> None:
    """An editor's tool sends a whole file in one string: it must not wait for the string's end."""
    made = make_tool_parser("qwen3_coder", SCHEMAS)
    assert made is not None
    made.feed("<tool_call>\n<function=edit>\n<parameter=text>\n")
    assert made.feed("first\nsecond") == [CallArguments("first\\nsecond")]
    assert made.feed('\n"third"') == [CallArguments('\\n\\"third\\"')]
