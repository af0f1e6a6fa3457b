"""Ids of calls in histories that any server made, for templates that want a form of their own."""

from __future__ import annotations

import re

import pytest

from services.tokenizer.call_ids import ids_of
from services.tokenizer.confined.renderers import RendererPool
from shared.errors import RequestError
from shared.messages import ChatMessage, ChatOptions, ToolCall

OURS, CLAUDE_S, MISTRAL_S = "call_1f0c9d2b7a3e4f5061728394", "toolu_01AbC-é", "abc123XYZ"
RAISE = "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
MISTRAL = (  # as Mistral's own templates do
    "{% for m in messages %}"
    '{% if m.role == "user" %}[INST]{{ m.content }}[/INST]{% endif %}'
    "{% for call in m.tool_calls or [] %}"
    f"{{% if not call.id is defined or call.id|length != 9 %}}{RAISE}{{% endif %}}"
    '[TOOL_CALLS]{{ call.function.name }} "id": "{{ call.id }}"'
    "{% endfor %}"
    '{% if m.role == "tool" %}'
    f"{{% if not m.tool_call_id is defined or m.tool_call_id|length != 9 %}}{RAISE}{{% endif %}}"
    '[TOOL_RESULTS]{{ m.content }} "call_id": "{{ m.tool_call_id }}"'
    "{% endif %}{% endfor %}"
)
KIMI = (  # as Kimi K2's template does
    "{% for m in messages %}"
    "{% for call in m.tool_calls or [] %}"
    "<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>{{ call['function']['arguments'] | tojson }}"
    "<|tool_call_end|>{% endfor %}"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}{% endif %}{% endfor %}"
)
ASKED = ChatMessage("user", "How is the weather?")


def calling(*ids: str) -> list[ChatMessage]:
    """A turn that has calls with these ids, and their answers, the last first."""
    calls = [ToolCall(one, "weather", "{}") for one in ids]
    answers = [ChatMessage("tool", f"of {place}", tool_call_id=one) for place, one in enumerate(ids)]
    return [ASKED, ChatMessage("assistant", "", tool_calls=calls), *reversed(answers)]


async def rendered(template: str, chat: list[ChatMessage], *, tool_template: str | None = None, tools: str = "") -> str:
    pool = RendererPool(
        template, {}, timeout=10, max_output_bytes=1 << 20, num_renderers=1, tool_template=tool_template
    )
    await pool.start()
    try:
        return await pool.render(chat, ChatOptions(tools=tools))
    finally:
        await pool.close()


@pytest.mark.parametrize("own_template", [False, True])
async def test_mistral_s_template_gets_nine_letters_and_digits(own_template: bool) -> None:
    """`own_template`: one for chats with tools, which alone has the check."""
    chat = calling(OURS, CLAUDE_S, MISTRAL_S) + calling("call_2")
    if own_template:
        text = await rendered("none", chat, tool_template=MISTRAL, tools='[{"type": "function"}]')
    else:
        text = await rendered(MISTRAL, chat)
    called = re.findall(r'"id": "([^"]*)"', text)
    answered = re.findall(r'"call_id": "([^"]*)"', text)
    assert len(set(called)) == 4 and all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in called)
    assert called[2] == MISTRAL_S, "what fits stays"
    assert answered == [*reversed(called[:3]), called[3]], "answers name their calls"
    assert await rendered(MISTRAL, chat) == text, "the prompt of the next turn begins with the same tokens"


async def test_a_call_without_an_id_is_refused_in_the_template_s_words() -> None:
    with pytest.raises(RequestError, match="alphanumeric strings with length 9"):
        await rendered(MISTRAL, calling(""))


async def test_kimi_s_template_gets_ids_with_the_names_and_numbers_of_their_calls() -> None:
    chat = calling(OURS, "functions.weather:7", "functions.clock:0") + calling(CLAUDE_S)
    text = await rendered(KIMI, chat)
    called = re.findall(r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>", text)
    assert called == ["functions.weather:0", "functions.weather:7", "functions.weather:2", "functions.weather:3"]
    answered = re.findall(r"## Return of (\S+)", text)
    assert answered == [*reversed(called[:3]), called[3]], "what the model wrote itself stays"


@pytest.mark.parametrize("check", [
    "tool_call.id|length != 9", "(tool_call['id'] | length) != 9", 'message["tool_call_id"]|length == 9',
])  # fmt: skip
def test_a_template_that_looks_at_ids_is_known(check: str) -> None:
    assert ids_of("{% if " + check + " %}x{% endif %}") is not None


async def test_other_templates_show_the_ids_that_a_client_has() -> None:
    shown = "{{ m.tool_calls[0].id if m.tool_calls }}{% if m.content|length != 9 %}.{% endif %}"
    assert await rendered("{% for m in messages %}" + shown + "{% endfor %}", calling(OURS)) == f".{OURS}.."
