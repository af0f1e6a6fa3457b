"""Answers in each format, written as its models are taught to, for the tests of parsers: what is in them is known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]
WORDS = [
    "Rome", "北京", "서울", "🦊🎉", "naïve", 'a "quoted" word', "back\\slash", "{[", "}]", "</tool_call>", "\n", "é́",
    "it's", "a, b: c", "True",
]  # fmt: skip
KEYS = ["city", "note_2", "unit"]  # which formats with tags can write
NAMES = ["weather", "get_time", "look_up"]


def hermes(name: str, arguments: Arguments, rng: random.Random) -> str:
    gap = rng.choice(["", "\n", " "])
    return f'<tool_call>{gap}{{"name": {json.dumps(name)}, "arguments": {dumped(arguments, rng)}}}{gap}</tool_call>'


def llama(name: str, arguments: Arguments, rng: random.Random) -> str:
    return f'{{"name": {json.dumps(name)}, "parameters": {dumped(arguments, rng)}}}' + rng.choice([";", "; ", "\n"])


def mistral(name: str, arguments: Arguments, rng: random.Random) -> str:
    text = dumped(arguments, rng)
    listed = f'[TOOL_CALLS][{{"name": {json.dumps(name)}, "arguments": {text}}}]'
    return rng.choice([listed, f"[TOOL_CALLS]{name}[ARGS]{text}"])


def phi(name: str, arguments: Arguments, rng: random.Random) -> str:
    return f'functools[{{"name": {json.dumps(name)}, "arguments": {dumped(arguments, rng)}}}]'


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen3_coder(name: str, arguments: Arguments, rng: random.Random) -> str:
    inner = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
    call = f"<function={name}>\n{inner}</function>"
    return rng.choice([f"<tool_call>\n{call}\n</tool_call>", call, f"<tool_call>{call}</tool_call>"])


def glm(name: str, arguments: Arguments, rng: random.Random) -> str:
    gap = rng.choice(["", "\n"])
    pairs = [f"<arg_key>{key}</arg_key>{gap}<arg_value>{bare(value)}</arg_value>" for key, value in arguments.items()]
    return f"<tool_call>{name}{gap}{gap.join(pairs)}{gap}</tool_call>"


def kimi(name: str, arguments: Arguments, rng: random.Random) -> str:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    number, text = rng.randrange(12), dumped(arguments, rng)
    call = f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
    return f"{begin}{call}{end}"


def deepseek_v3(name: str, arguments: Arguments, rng: random.Random) -> str:
    text = dumped(arguments, rng)
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


def deepseek_v31(name: str, arguments: Arguments, rng: random.Random) -> str:
    text = dumped(arguments, rng)
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def deepseek_v32(name: str, arguments: Arguments, rng: random.Random) -> str:
    inner = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">{bare(value)}'
        "</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    block = rng.choice(["function_calls", "tool_calls"])
    return f'<｜DSML｜{block}>\n<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n</｜DSML｜{block}>'


def harmony(name: str, arguments: Arguments, rng: random.Random) -> str:
    begin = rng.choice(["<|start|>assistant<|channel|>commentary", "<|channel|>commentary", "<|start|>assistant"])
    if begin == "<|start|>assistant":
        header = f"{begin} to=functions.{name}<|channel|>commentary "
    else:
        header = f"{begin} to=functions.{name} "
    return f"{header}<|constrain|>json<|message|>{dumped(arguments, rng)}<|call|>"


def marked(value: Any, mark: str) -> str:
    """A value in Gemma's notation."""
    if isinstance(value, str):
        return f"{mark}{value}{mark}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{marked(inner, mark)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(marked(inner, mark) for inner in value) + "]"
    return json.dumps(value)


def functiongemma(name: str, arguments: Arguments, rng: random.Random) -> str:
    return f"<start_function_call>call:{name}{marked(arguments, '<escape>')}<end_function_call>"


def gemma4(name: str, arguments: Arguments, rng: random.Random) -> str:
    return f"<|tool_call>call:{name}{marked(arguments, '<|' + chr(34) + '|>')}<tool_call|>"


def pythonic(name: str, arguments: Arguments, rng: random.Random) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def dumped(arguments: Arguments, rng: random.Random) -> str:
    return json.dumps(arguments, ensure_ascii=rng.random() < 0.5)


WRITERS: dict[str, Callable[[str, Arguments, random.Random], str]] = {
    "hermes": hermes, "llama3_json": llama, "mistral": mistral, "phi4_mini_json": phi, "qwen3_coder": qwen3_coder,
    "glm45": glm, "kimi_k2": kimi, "deepseek_v3": deepseek_v3, "deepseek_v31": deepseek_v31,
    "deepseek_v32": deepseek_v32, "openai": harmony, "functiongemma": functiongemma, "gemma4": gemma4,
    "llama4_pythonic": pythonic,
}  # fmt: skip
VERBATIM = frozenset({"hermes", "llama3_json", "mistral", "phi4_mini_json", "kimi_k2", "deepseek_v3", "deepseek_v31",
                      "openai"})  # formats whose arguments are JSON, which goes out as it is written  # fmt: skip
SCHEMAS = {
    name: {"properties": {"note_2": {"type": "string"}, "city": {"type": ["string", "null", "number", "array"]}}}
    for name in NAMES
}


def answer(name: str, rng: random.Random) -> tuple[str, str, list[tuple[str, Arguments]]]:
    """A random answer: its text, what was thought, and the calls in it with their arguments."""
    thought = " ".join(rng.choices([word for word in WORDS if word.strip()], k=rng.randrange(4)))
    calls = []
    for _ in range(rng.randrange(4)):
        key = rng.choice(KEYS if name not in VERBATIM else WORDS)
        word = rng.choice([one for one in WORDS if one.strip() not in ("True",)])
        value = word if key == "note_2" else rng.choice([word, 1.5, None, [1, {"x": rng.choice(WORDS)}]])
        calls.append((rng.choice(NAMES), {key: value}))
    written = [WRITERS[name](called, given, rng) for called, given in calls]
    if name == "llama4_pythonic":
        return f"<think>\n{thought}\n</think>\n\n" + (f"[{', '.join(written)}]" if written else ""), thought, calls
    if name == "openai":
        return f"<|channel|>analysis<|message|>{thought}<|end|>" + "".join(written), thought, calls
    return f"<think>\n{thought}\n</think>\n\n" + "".join(written), thought.strip(), calls
