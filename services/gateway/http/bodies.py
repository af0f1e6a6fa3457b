"""The bodies of /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.http.fields import GenerationBody, Int, TokenId


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | Int | list[TokenId]]
    max_tokens: Int | None = None
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None  # as a chat has them
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
