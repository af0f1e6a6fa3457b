"""The bodies of /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from services.gateway.http.fields import ClientNames, GenerationBody, Int, TokenId


class CompletionBody(GenerationBody, kw_only=True):
    client_names: ClassVar[ClientNames] = {
        "token_ids": ("prompt",),
        "label": ("request_id",),
        "n": ("best_of", "n"),
        "beam_width": ("beam_width", "best_of", "n"),
        "prompt_logprobs": ("prompt_logprobs", "logprobs"),
    }

    prompt: str | list[str | Int | list[TokenId]]
    max_tokens: Int | None = None
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Exactly one of `prompt` and `messages`."""

    client_names: ClassVar[ClientNames] = {
        "prompt": ("messages", "prompt"),
        "chat": ("messages",),
        "token_ids": ("messages", "prompt"),
    }

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None  # as a chat has them
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def message_name(self, place: int) -> str:
        return f"messages[{place}]"


class DetokenizeBody(msgspec.Struct, kw_only=True):
    client_names: ClassVar[ClientNames] = {"token_ids": ("tokens",), "prompt": ("tokens",)}

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
