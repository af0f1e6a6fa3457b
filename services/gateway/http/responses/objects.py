"""What /v1/responses reads and answers: its text part.  Fields that mean more than text are refused by name."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from services.gateway.http.answers.objects import Explanations
from services.gateway.http.chat.objects import ContentPart
from services.gateway.http.requests.fields import ClientNames, Int, WithoutEffect


class InputItem(msgspec.Struct, kw_only=True):
    """A message; items of other types are refused."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(WithoutEffect, kw_only=True):
    client_names: ClassVar[ClientNames] = {
        "prompt": ("prompt", "input"),
        "chat": ("input",),
        "token_ids": ("input",),
        "label": ("request_id",),
        "max_tokens": ("max_output_tokens",),
        "chat_template_kwargs": ("reasoning",),
    }

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None  # the chat's first message
    max_output_tokens: Int | None = None  # default: what is left of the context
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    seed: Int | None = None
    stream: bool | None = None
    stream_options: Any = None  # without effect: nothing is obfuscated
    metadata: dict[str, str] | None = None  # the response has it again
    text: TextOptions | None = None  # the format of the output
    reasoning: ReasoningOptions | None = None
    priority: Int | None = None
    request_id: str | None = None  # a label for logs and Abort
    explain: bool | None = None  # the last event says where the time went, in `explanations`
    parallel_tool_calls: bool | None = None
    # not possible here
    tools: list[Any] | None = None
    tool_choice: Any = None  # none or auto
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    background_options: Any = None
    prompt: Any = None
    include: list[str] | None = None
    truncation: str | None = None  # only disabled
    max_tool_calls: Int | None = None
    top_logprobs: Int | None = None
    moderation: Any = None
    context_management: Any = None
    access_programs: Any = None
    image: Any = None
    mm_processor_kwargs: Any = None
    cache_salt: str | None = None

    def message_name(self, place: int) -> str:
        """The instructions are the chat's first message."""
        if self.instructions and not place:
            return "instructions"
        return "input" if isinstance(self.input, str) else f"input[{place - bool(self.instructions)}]"


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
