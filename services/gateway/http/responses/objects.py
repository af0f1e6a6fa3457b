"""What a response of /v1/responses is made of, and the events by which it grows."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.http.answers.objects import Explanations


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class TextPart(msgspec.Struct, kw_only=True):
    type: str  # output_text or reasoning_text
    text: str
    annotations: list[Any] | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET


class Item(msgspec.Struct, kw_only=True):
    """A message of the assistant, or its reasoning."""

    type: str
    id: str
    status: str = "in_progress"
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: list[TextPart]
    summary: list[Any] | msgspec.UnsetType = msgspec.UNSET


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    model: str
    output: list[Item]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, str | None]
    store: bool = False
    temperature: float | None
    text: dict[str, dict[str, Any]]
    tool_choice: str = "auto"
    tools: list[Any] = []
    top_p: float | None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    explanations: Explanations = msgspec.UNSET
