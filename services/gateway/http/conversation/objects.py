"""Messages, tools and choices as bodies have them, in the shape of chats, which is what templates know."""

from __future__ import annotations

from typing import Any

import msgspec


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content; only text can be read here."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | None = None


class CallBody(msgspec.Struct, kw_only=True):
    """A call that an assistant made earlier."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class MessageBody(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[CallBody] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name for the same


class FunctionBody(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, kw_only=True):
    type: str
    function: FunctionBody


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class NamedChoice(msgspec.Struct, kw_only=True):
    type: str | None = None
    function: FunctionName
