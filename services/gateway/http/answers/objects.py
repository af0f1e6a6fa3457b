"""What the answers of several endpoints are made of, in OpenAI's shape and vLLM's additions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from services.gateway.streams.stream import Stream
from shared.tracing.explanation import Explanation

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class TokenUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class LegacyLogprobs(msgspec.Struct):
    """Parallel columns, one entry per token; the first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]  # characters before the token, in what this choice shows


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


Explanations = list[Explanation] | UnsetType
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, "application/json")


def usage_of(streams: list[Stream], *, has_output: bool = True) -> TokenUsage:
    """Of all prompts and all sequences together, so far; without output of the prompts alone."""
    num_prompt = sum(stream.num_prompt_tokens for stream in streams)
    num_output = sum(stream.num_output_tokens for stream in streams) if has_output else 0
    cached = PromptTokensDetails(sum(stream.num_cached_tokens for stream in streams))
    counts = [stream.num_reasoning_tokens for stream in streams if stream.num_reasoning_tokens is not None]
    details = CompletionTokensDetails(sum(counts) if has_output else 0) if counts else UNSET
    return TokenUsage(num_prompt, num_output, num_prompt + num_output, cached, details)


def fingerprint_of(streams: Iterable[Stream]) -> str | UnsetType:
    """Of the worker that began them; of several prompts, which mixed workers may have, each once."""
    return ",".join(sorted({stream.fingerprint for stream in streams if stream.fingerprint})) or UNSET


def explanations(streams: Sequence[Stream], wanted: bool | None) -> Explanations:
    """Where the time went, for each prompt; nothing unless it is `wanted`, or where times are not tracked."""
    found = [stream.latency.explanation() for stream in streams if wanted and stream.latency is not None]
    return found or UNSET


def stop_reason(stream: Stream, reason: str) -> str | int | None:
    """What the client named and the model has met; None for the model's own end."""
    params = stream.request.params
    if reason in params.stop:
        return reason
    return int(reason) if reason.isdecimal() and int(reason) in params.stop_token_ids else None


def given(value: Any, wanted: object) -> Any:
    """`value` where it was asked for; else the field is left out."""
    return value if wanted else UNSET
