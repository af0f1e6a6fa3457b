"""Formats that chat templates show, in pieces of the templates themselves."""

from __future__ import annotations

import pytest

from services.gateway.http.parsing.detection import reasoning_format, tool_format
from services.gateway.http.parsing.registry import REASONING_FORMATS, TOOL_PARSERS

OPENED = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
SWITCHED = (
    "{%- if add_generation_prompt %}{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)
SHOWN = [
    ('<tool_call>\\n{\\"name\\": <function-name>', "hermes", ""),
    ("content.split('</think>') <tool_call>" + SWITCHED, "hermes", "qwen3"),
    ("content.split('</think>') <tool_call>" + OPENED, "hermes", "deepseek_r1"),
    ("<tool_call>\\n<function=example>\\n<parameter=a>", "qwen3_coder", ""),
    ("<tool_call> <arg_key> <arg_value> </think>", "glm45", "glm45"),
    ("<|tool_calls_section_begin|> <|tool_call_argument_begin|>", "kimi_k2", ""),
    ("<｜tool▁sep｜> ```json </think>" + OPENED, "deepseek_v3", "deepseek_r1"),
    ("<｜tool▁sep｜> </think> thinking", "deepseek_v31", "deepseek_v3"),
    ("<｜DSML｜function_calls>", "deepseek_v32", "deepseek_v3"),
    ("<|start|>assistant<|channel|>final<|message|>", "openai", "openai_gptoss"),
    ("<|tool_call>call: <|channel>", "gemma4", "gemma4"),
    ("<start_function_call>call:", "functiongemma", ""),
    ("<|python_start|>", "llama4_pythonic", ""),
    ("<|tool|> <|/tool|>", "phi4_mini_json", ""),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", ""),
    ('{"name": function name, "parameters": dictionary of argument name', "llama3_json", ""),
    ("{{ messages }}", "", ""),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), SHOWN)
def test_what_a_template_shows(template: str, tools: str, reasoning: str) -> None:
    assert (tool_format(template), reasoning_format(template)) == (tools, reasoning)
    assert not tools or tools in TOOL_PARSERS
    assert not reasoning or reasoning in REASONING_FORMATS
