"""What /v1/chat/completions reads and answers: messages, tools, and how the answer is to be."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.http.answers.objects import Explanations, PromptLogprobs, TokenLogprob, TokenUsage
from services.gateway.http.answers.timing import RequestMetrics
from services.gateway.http.conversation.objects import MessageBody, NamedChoice
from services.gateway.http.requests.fields import ClientNames, GenerationBody, Int, NotSupported


class ChatBody(GenerationBody, kw_only=True):
    client_names: ClassVar[ClientNames] = {
        "prompt": ("messages",),
        "chat": ("messages",),
        "token_ids": ("messages",),
        "label": ("request_id",),
        "max_tokens": ("max_completion_tokens", "max_tokens"),
        "logprobs": ("top_logprobs", "logprobs"),
        "beam_width": ("beam_width", "best_of", "n"),
    }

    messages: list[MessageBody]
    max_tokens: Int | None = None  # default: what is left of the context
    max_completion_tokens: Int | None = None  # the same, and counts before it
    logprobs: bool | None = None  # log-probabilities of the output's tokens
    top_logprobs: Int | None = None  # and of so many likeliest tokens at each position
    tools: list[dict[str, Any]] | None = None  # needs tool_call_parser
    tool_choice: str | NamedChoice | None = None  # auto, none, required, or a function's name
    parallel_tool_calls: bool | None = None
    best_of: Int | None = None  # as n, or refused
    reasoning_effort: str | None = None  # a variable of the chat template
    verbosity: str | None = None  # without effect
    include_reasoning: bool | None = None  # false: without reasoning_content
    echo: bool | None = None  # with continue_final_message: the answer begins with that message
    add_generation_prompt: bool | None = None  # default true: the chat ends with the beginning of an answer
    continue_final_message: bool | None = None  # the last message stays open, and the output continues it
    add_special_tokens: bool | None = None  # only false: the template has them
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the template
    # not possible here
    chat_template: Annotated[str | None, NotSupported("a chat template from a client")] = None
    documents: Annotated[Any, NotSupported("documents beside the messages")] = None
    functions: Annotated[Any, NotSupported("functions (their successor is tools)")] = None
    function_call: Annotated[Any, NotSupported("function_call (its successor is tool_choice)")] = None
    modalities: list[str] | None = None  # only text
    audio: Annotated[Any, NotSupported("audio")] = None
    prediction: Annotated[Any, NotSupported("predicted outputs")] = None
    web_search_options: Annotated[Any, NotSupported("web search")] = None


class ChoiceLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class Function(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallPart(msgspec.Struct, kw_only=True):
    """A whole call, or in a stream what is new of one: then `index` says which."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, under vLLM's newer name
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: MessageDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


Choice = TypeVar("Choice", ChatChoice, ChunkChoice)


class ChatCompletion(msgspec.Struct, Generic[Choice], kw_only=True):
    """A whole answer, or one event of a stream: then its choices are chunks."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: TokenUsage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    explanations: Explanations = UNSET
