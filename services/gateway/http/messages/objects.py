"""What /v1/messages reads and answers: Anthropic's API.  Fields for more than text and tools are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.http.answers.objects import Explanations
from services.gateway.http.requests.fields import ClientNames, Int, NotSupported


class InputBlock(msgspec.Struct, kw_only=True):
    """A block of a message: text, thinking, a use of a tool or its result; blocks of other types are refused."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None  # is not checked: what the model is shown is the client's affair
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None  # without effect: every prefix is cached


class InputMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[InputBlock]


class ToolDefinition(msgspec.Struct, kw_only=True):
    name: str
    type: str | None = None  # only custom
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None  # without effect: input is held to the schema where a use is demanded
    cache_control: Any = None  # without effect
    eager_input_streaming: bool | None = None  # without effect: input is streamed as the model writes it
    input_examples: Any = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: Int | None = None  # of reasoning, behind which the answer is forced to begin
    display: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: dict[str, Any] | None = None
    task_budget: Any = None


class MessagesPrompt(msgspec.Struct, kw_only=True):
    """What a prompt is made from; count_tokens reads no more."""

    client_names: ClassVar[ClientNames] = {
        "prompt": ("messages",),
        "chat": ("messages",),
        "token_ids": ("messages",),
        "chat_template_kwargs": ("output_config", "thinking"),
    }

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[InputBlock] | None = None
    tools: list[dict[str, Any]] | None = None  # needs tool_call_parser
    tool_choice: ToolChoice | None = None  # auto, any, none, or a tool
    thinking: Thinking | None = None  # enabled, adaptive or disabled
    output_config: OutputConfig | None = None  # effort, and a format that the output is held to
    output_format: dict[str, Any] | None = None  # an older name of output_config.format
    cache_control: Any = None  # without effect: every prefix is cached
    context_management: Any = None  # only what changes nothing: thinking that is kept
    speed: str | None = None  # only standard
    # not possible here
    container: Annotated[Any, NotSupported("containers")] = None
    diagnostics: Annotated[Any, NotSupported("diagnostics (the field explain says where the time went)")] = None
    mcp_servers: Annotated[Any, NotSupported("calling servers of tools")] = None
    fallbacks: Annotated[Any, NotSupported("falling back to other models")] = None
    inference_geo: Annotated[str | None, NotSupported("choosing a place of inference")] = None
    user_profile_id: Annotated[str | None, NotSupported("profiles of users")] = None
    workspace_id: Annotated[str | None, NotSupported("workspaces")] = None


class MessagesBody(MessagesPrompt, kw_only=True):
    client_names: ClassVar[ClientNames] = {
        **MessagesPrompt.client_names,
        "label": ("request_id",),
        "stop": ("stop_sequences",),
    }

    max_tokens: Int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stop_sequences: list[str] | None = None  # texts that end the output
    metadata: Any = None  # without effect
    service_tier: str | None = None  # without effect
    seed: Int | None = None
    priority: Int | None = None  # smaller runs earlier, with scheduling_policy=priority
    request_id: str | None = None  # a label for logs and Abort
    explain: bool | None = None  # the answer says where its time went, in `explanations`


class OutputBlock(msgspec.Struct, kw_only=True):
    """A text, thinking, or a use of a tool."""

    type: str
    text: str | UnsetType = UNSET
    citations: UnsetType | None = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Prompt tokens are in two parts, which add up: those that were computed, and those of the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    service_tier: str = "standard"


class AnsweredMessage(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    explanations: Explanations = UNSET


class TokenCount(msgspec.Struct):
    input_tokens: int
