"""What the answers of /v1/completions are made of, in OpenAI's shape and vLLM's additions."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.http.answers.objects import Explanations, LegacyLogprobs, PromptLogprobs, TokenUsage


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole answer, or one event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    explanations: Explanations = UNSET
