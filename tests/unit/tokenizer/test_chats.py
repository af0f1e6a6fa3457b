"""Chats with tools and options: what a template sees of them, and what Qwen's own template writes."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.chats import MAX_TOOLS, num_bytes, render_job, template_message
from services.tokenizer.confined.template import compile_template, render
from shared.errors import RequestError
from shared.messages import ChatMessage, ChatOptions, ToolCall
from tests.unit.detokenizer.models import tokenizer

ASKED = ChatMessage("user", "How is the weather?")
CALLED = ChatMessage("assistant", "", tool_calls=[ToolCall("c1", "weather", '{"city": "Rome"}')])
ANSWERED = ChatMessage("tool", "sunny", tool_call_id="c1")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def text(template: str, chat: list[ChatMessage], **options: Any) -> str:
    return render(compile_template(template), {}, render_job(chat, ChatOptions(**options)), 1 << 20)


@pytest.mark.parametrize("now", [0.0, 1.7e9, float("nan"), float("inf"), -1e30])
def test_a_prompt_s_time_is_its_request_s_so_that_it_is_the_same_whenever_it_is_made(now: float) -> None:
    template = compile_template("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}")
    said = render(template, {}, render_job([ASKED], now=now), 1 << 20)
    assert said == datetime.fromtimestamp(now if now == 1.7e9 else 0.0).strftime("%Y-%m-%d %H:%M:%S")


def test_only_what_is_there_is_shown() -> None:
    assert template_message(ASKED) == {"role": "user", "content": "How is the weather?"}
    shown = template_message(CALLED)
    assert shown["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert template_message(ANSWERED)["tool_call_id"] == "c1"
    broken = ChatMessage("assistant", "", tool_calls=[ToolCall("c1", "weather", "not JSON")])
    assert template_message(broken)["tool_calls"][0]["function"]["arguments"] == "not JSON"


def test_qwen_s_template_with_tools(data_dir: Path) -> None:
    template = tokenizer(data_dir / "tokenizers/qwen3").chat_template
    assert template is not None
    found = text(template, [ASKED, CALLED, ANSWERED], tools=json.dumps([TOOL]))
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in found
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in found
    assert "<tool_response>\nsunny\n</tool_response>" in found
    assert found.endswith("<|im_start|>assistant\n")
    without = text(template, [ASKED], template_args='{"enable_thinking": false}')
    assert "<tools>" not in without and without.endswith("<think>\n\n</think>\n\n")


def test_the_last_message_is_left_open(data_dir: Path) -> None:
    template = tokenizer(data_dir / "tokenizers/qwen3").chat_template
    assert template is not None
    begun = [ASKED, ChatMessage("assistant", "It is ")]
    found = text(template, begun, add_generation_prompt=False, continue_final_message=True)
    assert found.endswith("It is")


REFUSED: list[dict[str, Any]] = [
    {"tools": "{}"},
    {"tools": "[1]"},
    {"tools": json.dumps([TOOL] * (MAX_TOOLS + 1))},
    {"template_args": "[]"},
    {"template_args": "{"},
    {"template_args": '{"messages": []}'},
    {"continue_final_message": True},
]


@pytest.mark.parametrize("options", REFUSED, ids=range(len(REFUSED)))
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        render_job([ASKED], ChatOptions(**options))
    assert caught.value.field in ("tools", "chat_template_kwargs", "continue_final_message")


def test_everything_that_is_rendered_counts() -> None:
    chat = [ChatMessage("user", "é", "n", "i", [ToolCall("a", "b", "cd")], "r")]
    assert num_bytes(chat, None) == len("user") + 2 + 1 + 1 + 4 + 1
    assert num_bytes(chat, ChatOptions("12", "345", opening="6")) == num_bytes(chat, None) + 6
