"""Which formats a model was taught, as far as its chat template shows it."""

from __future__ import annotations

import re

TOOLS = (  # marks that a template has, all of them, and the parser; the first that fits is taken
    (("<|channel|>", "<|message|>"), "openai"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁sep｜>",), "deepseek_v31"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|/tool|>",), "phi4_mini_json"),
    (("functools",), "phi4_mini_json"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "hermes"),
    (('"parameters": dictionary',), "llama3_json"),
)
OF_TOOLS = {"openai": "openai_gptoss", "gemma4": "gemma4", "deepseek_v31": "deepseek_v3", "deepseek_v32": "deepseek_v3"}
THINKS, OPENS = "</think>", "<think>"
PROMPT = re.compile(r"\{%-?\s*if\s+add_generation_prompt")  # what follows the last one begins the answer
CONDITIONS = ("thinking", "enable_thinking", "reasoning")


def tool_format(template: str) -> str:
    """The name of the parser; empty where the template shows no format that is known."""
    return next((name for marks, name in TOOLS if all(mark in template for mark in marks)), "")


def reasoning_format(template: str) -> str:
    """The name of the parser; empty where the template shows none."""
    tools = tool_format(template)
    if tools in OF_TOOLS:
        return OF_TOOLS[tools]
    if THINKS not in template:
        return ""
    if tools in ("kimi_k2", "glm45"):
        return tools
    begins = [found.end() for found in PROMPT.finditer(template)]
    ending = template[begins[-1] :] if begins else ""
    if OPENS in ending and THINKS not in ending and not any(word in ending for word in CONDITIONS):
        return "deepseek_r1"  # the template itself opens the reasoning, whatever is asked
    return "qwen3"
