"""Chats with tools and options: what a template sees of them, and what Qwen's own template writes."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

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
    assert found.endswith("It is "), "this template trims no content"


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA_3 = "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}"
)
OPEN: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize("content", [
    "<", "end", "id", "s", "It is", "It is ", "It is\n\n", "It is \n", "\nIt is\t", "a<|im_end|>",
    "How is the weather?",
])  # fmt: skip
@pytest.mark.parametrize("template", [CHATML, LLAMA_3, LLAMA_2], ids=["chatml", "llama-3", "llama-2"])
def test_a_message_is_left_open_where_its_words_end(template: str, content: str) -> None:
    """Words may be those of the template, too; white space behind them stays where the template leaves it."""
    begun = [ASKED, ChatMessage("assistant", content)]
    head = text(template, [ASKED, ChatMessage("assistant", "WORDS")]).partition("WORDS")[0]
    found = text(template, begun, **OPEN)
    assert text(template, begun, add_generation_prompt=False).startswith(found)
    if template == CHATML:
        assert found == head + content
    else:
        assert found.rstrip() == head + content.strip()


@pytest.mark.parametrize(("template", "content"), [
    ("{% for m in messages %}{{ m.role }}{% endfor %}", "user"), (CHATML, ""), (CHATML, " \n"),
], ids=["elsewhere", "empty", "blank"])  # fmt: skip
def test_a_message_without_words_of_its_own_cannot_be_continued(template: str, content: str) -> None:
    with pytest.raises(TemplateError, match="cannot be continued"):
        text(template, [ASKED, ChatMessage("assistant", content)], **OPEN)


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
