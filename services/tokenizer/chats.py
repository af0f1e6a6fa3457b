"""From a chat on the wire to what a template sees: plain values under the names that templates of the field expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.tokenizer.confined.frames import RenderJob
from shared.errors import RequestError
from shared.messages import ChatMessage, ChatOptions, ToolCall

MAX_TOOLS = 256
LATEST = 1 << 33  # Unix seconds that a calendar can be made of
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")  # the server's own words to a template


def render_job(chat: Sequence[ChatMessage], options: ChatOptions | None = None, now: float = 0.0) -> RenderJob:
    """One chat to render, at `now` (Unix seconds).  Raises RequestError where the options are not as they should be."""
    options = options or ChatOptions()
    if options.continue_final_message and options.add_generation_prompt:
        raise RequestError(
            "continue_final_message cannot be given with add_generation_prompt", field="continue_final_message"
        )
    return RenderJob(
        [template_message(message) for message in chat],
        tools=_decoded(options.tools, list[dict[str, Any]], "tools"),
        variables=_variables(options.template_args),
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        now=now if 0 <= now < LATEST else 0.0,
    )


def template_message(message: ChatMessage) -> dict[str, Any]:
    """Only what is there: templates ask whether a key exists."""
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning,
        "tool_calls": [_template_call(call) for call in message.tool_calls],
    }
    shown = {name: value for name, value in optional.items() if value}
    return {"role": message.role, "content": message.content, **shown}


def num_bytes(chat: Sequence[ChatMessage], options: ChatOptions | None) -> int:
    """About what a chat takes, with everything that is rendered with it."""
    texts = [options.tools, options.template_args, options.opening] if options is not None else []
    for message in chat:
        texts += [message.role, message.content, message.name, message.tool_call_id, message.reasoning]
        texts += [part for call in message.tool_calls for part in (call.id, call.name, call.arguments)]
    return sum(len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Templates write arguments with `tojson`, so they get the object; what is none stays the text that it was."""
    try:
        arguments: Any = msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _variables(text: str) -> dict[str, Any]:
    variables: dict[str, Any] = _decoded(text, dict[str, Any], "chat_template_kwargs") or {}
    for name in RESERVED:
        if name in variables:
            raise RequestError(f"chat_template_kwargs cannot contain {name}", field="chat_template_kwargs")
    return variables


def _decoded(text: str, kind: Any, field: str) -> Any:
    """The JSON value in `text`, None where there is none."""
    if not text:
        return None
    try:
        value = msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(f"{field} is not the JSON that it should be: {error}", field=field) from None
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise RequestError(f"{field} has {len(value)} entries, more than {MAX_TOOLS}", field=field)
    return value
