"""What the items and tools of a body of /v1/responses are."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.http.conversation.objects import ContentPart

MESSAGE = "message"


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message, reasoning, a call of a function or its output; items of other types are refused."""

    type: str = msgspec.field(default_factory=lambda: MESSAGE)  # is always written
    id: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    encrypted_content: str | None = None
    summary: list[ContentPart] | None = None  # none is made here
    status: str | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # without effect: arguments are held to the schema where a call is demanded
    output_schema: Any = None  # without effect
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    async_: bool | None = msgspec.field(name="async", default=None)


class Namespace(msgspec.Struct, kw_only=True):
    """Functions under one name."""

    name: str
    tools: list[dict[str, Any]]


class NamedTool(msgspec.Struct, kw_only=True):
    name: str
    namespace: str | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: str
    tools: list[NamedTool]
