"""From a body of /v1/messages to a conversation.  What cannot be done is refused by name, nothing is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.http.conversation.form import Conversation
from services.gateway.http.conversation.objects import FunctionName, NamedChoice
from services.gateway.http.conversation.prompt import ToolUse
from services.gateway.http.conversation.turns import ASSISTANT, USER, Turns
from services.gateway.http.messages.objects import (
    InputBlock,
    MessagesBody,
    MessagesPrompt,
    OutputConfig,
    Thinking,
    ToolDefinition,
)
from services.gateway.http.requests.formats import AnswerFormats
from services.gateway.http.requests.output_format import response_format
from services.gateway.http.requests.reading import converted, field_error
from services.gateway.http.requests.sampling import NOTHING, refuse_impossible
from services.gateway.http.requests.thinking import read_budget
from shared.errors import RequestError
from shared.requests.grammar import Grammar
from shared.requests.reasoning import ThinkingBudget
from shared.requests.sampling import SamplingParams

ROLES = (USER, ASSISTANT, "system")
BILLING = "x-anthropic-billing-header:"  # how a block begins that is not for the model
BUDGET = "thinking.budget_tokens"
KEPT_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}  # an edit of the context that changes nothing
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKS = {"enabled": True, "adaptive": True, "disabled": False}
SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn reasoning on and off


def conversation_of(body: MessagesPrompt, formats: AnswerFormats) -> Conversation:
    _check(body)
    turns = turns_of(body)
    last = turns.last
    continues = last is not None and last.role == ASSISTANT
    if last is not None and continues and last.calls:
        raise field_error("messages", "must not end with tool_use blocks: their tool_result blocks are missing")
    choice, messages = body.tool_choice, turns.messages
    return Conversation(
        messages=messages,
        names=turns.names,
        tools=ToolUse(
            formats,
            _tools(body.tools or []),
            _choice(body),
            parallel=choice is None or not choice.disable_parallel_tool_use,
            variables=_variables(body) if body.thinking is not None else None,
            said=messages,
        ),
        variables=_variables(body),
        begins_a_message=not continues,
        continues_the_last=continues,
        shows_reasoning=body.thinking is None or body.thinking.display != "omitted",
        thinking=_budget(body, formats),
    )


def _check(body: MessagesPrompt) -> None:
    refuse_impossible(body, nothing=(*NOTHING, []))
    if body.speed not in (None, "standard"):
        raise field_error("speed", "can only be standard")
    managed = body.context_management or {}
    edits = managed.get("edits") if isinstance(managed, dict) else None
    if managed and (not isinstance(edits, list) or len(managed) > 1 or any(edit != KEPT_THINKING for edit in edits)):
        raise RequestError("context_management: editing the context is not supported by this server",
                           field="context_management")  # fmt: skip
    if body.output_config is not None and body.output_config.task_budget is not None:
        raise field_error("output_config.task_budget", "is not supported by this server")


# -- messages


def turns_of(body: MessagesPrompt) -> Turns:
    """The chat.  Raises RequestError on blocks that are neither text, nor thinking, nor about tools."""
    turns = Turns(merges=True)
    if isinstance(body.system, str) and body.system:
        turns.said("system", body.system, "system")
    elif body.system and (text := _text(body.system, "system", without=BILLING)):
        turns.said("system", text, "system")
    for place, message in enumerate(body.messages):
        field = f"messages[{place}]"
        if message.role not in ROLES:
            raise field_error(f"{field}.role", f"must be user, assistant or system, got {message.role[:32]!r}")
        if isinstance(message.content, str):
            turns.said(message.role, message.content, field)
            continue
        for number, block in enumerate(message.content):
            _add(turns, message.role, block, field, f"{field}.content[{number}]")
    if not body.messages:
        turns = Turns()
    turns.check("messages")
    return turns


def _add(turns: Turns, role: str, block: InputBlock, name: str, field: str) -> None:
    match role, block.type:
        case _, "text":
            turns.said(role, _given(block.text, f"{field}.text"), name)
        case "assistant", "thinking":
            if block.thinking:
                turns.thought(block.thinking, name)
        case "assistant", "tool_use":
            arguments = msgspec.json.encode(block.input or {}).decode()
            turns.called(_given(block.id, f"{field}.id"), _given(block.name, f"{field}.name"), arguments, name)
        case "user", "tool_result":
            content = block.content or ""
            text = content if isinstance(content, str) else _text(content, f"{field}.content")
            text = f"Error: {text}" if block.is_error else text
            turns.answered(_given(block.tool_use_id, f"{field}.tool_use_id"), text, name)
        case _:
            raise _not_read(block, field, f"; messages of role {role} cannot contain it")


def _text(blocks: Sequence[InputBlock], field: str, without: str | None = None) -> str:
    """Each block in lines of its own, but those that begin with `without`."""
    texts = []
    for place, block in enumerate(blocks):
        if block.type != "text":
            raise _not_read(block, f"{field}[{place}]", "; only text can be read")
        text = _given(block.text, f"{field}[{place}].text")
        if without is None or not text.startswith(without):
            texts.append(text)
    return "\n".join(texts)


def _given(text: str | None, field: str) -> str:
    if text is None:
        raise field_error(field, "is missing")
    return text


def _not_read(block: InputBlock, field: str, why: str) -> RequestError:
    return field_error(field, f"is a block of type {block.type[:32]!r}{why}")


# -- tools


def _tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As chats have them.  Raises RequestError on tools of the vendor's own."""
    found = []
    for place, tool in enumerate(tools):
        field = f"tools[{place}]"
        if (kind := tool.get("type")) not in (None, "custom"):
            raise field_error(f"{field}.type", f"is {str(kind)[:32]!r}; only custom tools can be used")
        read = converted(tool, ToolDefinition, field)
        for name, nothing in (("defer_loading", False), ("input_examples", []), ("allowed_callers", ["direct"])):
            if getattr(read, name) not in (None, nothing):
                raise field_error(f"{field}.{name}", "is not supported by this server")
        function = {"name": read.name, "description": read.description or "", "parameters": read.input_schema}
        found.append({"type": "function", "function": function})
    return found


def _choice(body: MessagesPrompt) -> str | NamedChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        return NamedChoice(function=FunctionName(name=_given(choice.name, "tool_choice.name")))
    if choice.type not in CHOICES:
        raise field_error("tool_choice.type", f"must be auto, any, tool or none, got {choice.type[:32]!r}")
    return CHOICES[choice.type]


# -- how the answer is to be


def _variables(body: MessagesPrompt) -> dict[str, Any]:
    """Of the template."""
    found: dict[str, Any] = {}
    if body.thinking is not None:
        found |= dict.fromkeys(SWITCHES, _thinks(body.thinking))
    if body.output_config is not None and body.output_config.effort is not None:
        found["reasoning_effort"] = body.output_config.effort
    return found


def _thinks(thinking: Thinking) -> bool:
    if thinking.type not in THINKS:
        raise field_error("thinking.type", f"must be enabled, adaptive or disabled, got {thinking.type[:32]!r}")
    if thinking.display not in (None, "summarized", "omitted"):
        raise field_error("thinking.display", f"must be summarized or omitted, got {thinking.display[:32]!r}")
    return THINKS[thinking.type]


def _budget(body: MessagesPrompt, formats: AnswerFormats) -> ThinkingBudget | None:
    """Without effect where the model's format has no reasoning that could be counted."""
    thinking = body.thinking
    if thinking is None or thinking.budget_tokens is None or thinking.type != "enabled":
        return None
    if thinking.budget_tokens < 1:
        raise field_error(BUDGET, f"must be at least 1, got {thinking.budget_tokens}")
    return None if formats.tags is None else read_budget(formats, thinking.budget_tokens, BUDGET, _variables(body))


def sampling_of(body: MessagesBody, conversation: Conversation, *, closes: bool) -> SamplingParams:
    given: dict[str, Any] = {"grammar": _format(body, closes=closes), **conversation.sampling}
    if body.stop_sequences:
        given["stop"] = body.stop_sequences
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        max_tokens=body.max_tokens,
        **given,
    )


def _format(body: MessagesBody, *, closes: bool) -> Grammar | None:
    config = body.output_config or OutputConfig()
    if config.format is not None and body.output_format is not None:
        raise RequestError("output_config.format and output_format cannot be given together", field="output_format")
    if config.format is not None:
        return response_format(config.format, "output_config.format", closes=closes)
    return response_format(body.output_format, "output_format", closes=closes)
