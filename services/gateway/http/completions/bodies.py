"""The body of /v1/completions."""

from __future__ import annotations

from typing import ClassVar

from services.gateway.http.requests.fields import ClientNames, GenerationBody, Int, TokenId


class CompletionBody(GenerationBody, kw_only=True):
    client_names: ClassVar[ClientNames] = {
        "token_ids": ("prompt",),
        "label": ("request_id",),
        "n": ("best_of", "n"),
        "beam_width": ("beam_width", "best_of", "n"),
        "prompt_logprobs": ("prompt_logprobs", "logprobs"),
    }

    prompt: str | list[str | Int | list[TokenId]]  # text, token ids, or a list of either (256 at most)
    max_tokens: Int | None = None  # default 16
    logprobs: Int | None = None
    echo: bool | None = None  # the answer begins with the prompt
    best_of: Int | None = None  # sequences that are generated; the n best are the answer
    suffix: str | None = None
    add_special_tokens: bool | None = None  # default true: as the tokenizer does for a prompt
