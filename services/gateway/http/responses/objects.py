"""What /v1/responses reads and answers.  Fields that mean more than text and functions are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.http.answers.objects import Explanations, TokenLogprob
from services.gateway.http.conversation.turns import Turns
from services.gateway.http.requests.fields import CacheHints, ClientNames, Int, NotSupported
from services.gateway.http.responses.inputs import InputItem
from services.gateway.http.responses.items import read_items


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(CacheHints, kw_only=True):
    client_names: ClassVar[ClientNames] = {
        "prompt": ("prompt", "input"),
        "chat": ("input",),
        "token_ids": ("input",),
        "label": ("request_id",),
        "max_tokens": ("max_output_tokens",),
        "logprobs": ("top_logprobs",),
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
    enable_response_messages: bool | None = None  # vLLM's: prompt and output as they were, in tokens and text
    explain: bool | None = None  # the last event says where the time went, in `explanations`
    parallel_tool_calls: bool | None = None
    tools: list[dict[str, Any]] | None = None  # functions, and namespaces of them; needs tool_call_parser
    tool_choice: Any = None  # auto, none, required, a function, or allowed_tools
    previous_response_id: str | None = None  # a stored response that this one goes on from
    include: list[str] | None = None  # reasoning.encrypted_content, message.output_text.logprobs
    top_logprobs: Int | None = None  # with the latter: so many likeliest tokens at each position
    client_metadata: Any = None  # without effect
    # not possible here
    conversation: Annotated[
        Any, NotSupported("stored conversations (previous_response_id goes on from a stored response)")
    ] = None
    background: Annotated[bool | None, NotSupported("answering in the background")] = None
    background_options: Annotated[Any, NotSupported("answering in the background")] = None
    prompt: Annotated[Any, NotSupported("stored prompts")] = None
    truncation: str | None = None  # only disabled
    max_tool_calls: Annotated[Int | None, NotSupported("calling tools of the server's own")] = None
    moderation: Annotated[Any, NotSupported("moderation")] = None
    context_management: Annotated[Any, NotSupported("compaction")] = None
    access_programs: Annotated[Any, NotSupported("access programs")] = None
    image: Annotated[Any, NotSupported("images")] = None
    mm_processor_kwargs: Annotated[Any, NotSupported("input that is not text")] = None

    def item_name(self, place: int) -> str:
        return "input" if isinstance(self.input, str) else f"input[{place}]"

    @property
    def items(self) -> list[InputItem]:
        """A text alone is a user's message."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input


def turns_of(body: ResponsesBody, before: Sequence[InputItem] = ()) -> Turns:
    """The chat: instructions, the items `before` those of the body, and those.  Raises RequestError on items that are
    none of a chat."""
    turns = Turns()
    if body.instructions:
        turns.said("system", body.instructions, "instructions")
    read_items(before, lambda _: "previous_response_id", turns)
    read_items(body.items, body.item_name, turns)
    turns.check("input")
    return turns


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
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class Item(msgspec.Struct, kw_only=True):
    """A message of the assistant, its reasoning, or a call of a function."""

    type: str
    id: str
    status: str = "in_progress"
    role: str | UnsetType = UNSET
    content: list[TextPart] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class RawMessage(msgspec.Struct, kw_only=True):
    """vLLM's: what the model was given, or what came, with all special tokens."""

    type: str = "raw_message_tokens"
    message: str
    tokens: list[int]


class ResponseObject(msgspec.Struct, kw_only=True):
    """Every field of the official description that a server of text and functions has a value for."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    model: str
    output: list[Item]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: None = None
    prompt: None = None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float | None
    top_p: float | None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    truncation: str = "disabled"
    service_tier: str = "default"
    usage: ResponseUsage | None = None
    user: str | UnsetType = UNSET
    safety_identifier: str | UnsetType = UNSET
    prompt_cache_key: str | UnsetType = UNSET
    input_messages: list[RawMessage] | UnsetType = UNSET
    output_messages: list[RawMessage] | UnsetType = UNSET
    explanations: Explanations = UNSET


class InputItems(msgspec.Struct, kw_only=True):
    """A page of what a response was made from."""

    object: str = "list"
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True
