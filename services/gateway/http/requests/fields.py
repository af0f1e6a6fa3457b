"""What the bodies of generation requests have in common: OpenAI's sampling fields, and those that servers have added.

A field that is absent or null keeps the server's default.  Ranges are the scheduler's to check; here are only types,
and the width of numbers, which the wire bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


ClientNames = Mapping[str, tuple[str, ...]]  # of the troupe's field: those it may come from, the first given counts


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class WithoutEffect(msgspec.Struct, kw_only=True):
    """Fields about OpenAI's own house, which clients send all the same: nothing here hangs on them."""

    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None


class GenerationBody(WithoutEffect, kw_only=True):
    """The fields of every generation, and those that mean more than can be done: `refused` says which are given."""

    client_names: ClassVar[ClientNames] = {}

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # OpenAI's
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    # of vLLM and others
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # without effect
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    speculate: bool | None = None
    explain: bool | None = None
    use_beam_search: bool | None = None
    beam_width: Int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    priority: Int | None = None
    request_id: str | None = None
    # formats that the output is held to: one of them
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None  # without effect
    # not possible here: refused by name, never ignored
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    logits_processors: Any = None
    prompt_embeds: Any = None
    cache_salt: str | None = None
    kv_transfer_params: Any = None
    mm_processor_kwargs: Any = None
    vllm_xargs: Any = None
    moderation: Any = None
