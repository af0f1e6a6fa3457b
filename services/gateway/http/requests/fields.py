"""What the bodies of generation requests have in common: OpenAI's sampling fields, and those that servers have added.

A field that is absent or null keeps the server's default.  Ranges are the scheduler's to check; here are only types,
and the width of numbers, which the wire bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, get_type_hints

import msgspec

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


ClientNames = Mapping[
    str, tuple[str, ...]
]  # by a field of the services' messages: the body's fields for it, of which the first given counts


class NotSupported(msgspec.Struct, frozen=True):
    """Marks a field of a body that asks for what is not supported here: it is refused by name, never ignored."""

    what: str


@cache
def refused_fields(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What is not supported, by the fields of a body that ask for it."""
    marks = {
        name: getattr(hint, "__metadata__", ()) for name, hint in get_type_hints(kind, include_extras=True).items()
    }
    return {name: mark.what for name, found in marks.items() for mark in found if isinstance(mark, NotSupported)}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None  # a last event with `usage`
    continuous_usage_stats: bool | None = None  # with include_usage: `usage` in every event


class WithoutEffect(msgspec.Struct, kw_only=True):
    """Fields that concern OpenAI's own service; clients send them, and nothing here depends on them."""

    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CacheHints(WithoutEffect, kw_only=True):
    """Of the prefix cache."""

    cache_salt: str | None = None  # only requests with the same salt share cached prompts, within their tenant
    prompt_cache_retention: str | None = None  # 24h: cached blocks are kept before others, within the tenant's share
    prompt_cache_options: Any = None  # `ttl`: the same for so long, as 30m; all else is without effect


class GenerationBody(CacheHints, kw_only=True):
    """The fields of every generation, and those that mean more than can be done."""

    client_names: ClassVar[ClientNames] = {}

    model: str | None = None  # absent: the one that is served
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # OpenAI's
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None  # by token id; clamped to [-100, 100]
    seed: Int | None = None
    stop: str | list[str] | None = None  # texts that end the output
    # of vLLM and others
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None  # tokens that end the output
    include_stop_str_in_output: bool | None = None  # default false
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # without effect
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None  # texts that are never generated
    prompt_logprobs: Int | None = None  # so many likeliest tokens at each place of the prompt
    logprob_token_ids: list[TokenId] | None = None  # with logprobs: of these tokens, in place of the likeliest
    truncate_prompt_tokens: Int | None = None  # keep so many last tokens of the prompt; -1: as many as fit
    truncation_side: str | None = None  # right: keep the first ones instead
    return_token_ids: bool | None = None  # ids of prompt and output beside the text
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens `token_id:N`
    speculate: bool | None = None
    thinking_token_budget: Int | None = None  # tokens of reasoning, behind which the answer is forced to begin; -1: any
    explain: bool | None = None  # the answer says where its time went, in `explanations`
    use_beam_search: bool | None = None  # docs/beams-and-embeddings.md, as the next three
    beam_width: Int | None = None  # beams that are followed
    length_penalty: float | None = None
    early_stopping: bool | str | None = None  # when the search ends
    priority: Int | None = None  # smaller runs earlier, with scheduling_policy=priority
    request_id: str | None = None  # a label for logs and Abort
    # formats that the output is held to: one of them
    response_format: dict[str, Any] | None = None  # OpenAI's: text, json_object or json_schema
    structured_outputs: Any = None  # vLLM's: an object with one of json, regex, choice, grammar, json_object
    guided_json: Any = None  # a JSON schema
    guided_regex: Any = None  # a regular expression, matched whole
    guided_choice: Any = None  # a list of texts
    guided_grammar: Any = None  # in the notation of Lark, or GBNF
    grammar: str | None = None  # llama.cpp's: GBNF
    json_schema: Any = None  # llama.cpp's: a JSON schema
    guided_decoding_backend: Any = None  # without effect
    # not possible here
    guided_whitespace_pattern: Annotated[Any, NotSupported("a pattern for white space")] = None
    structural_tag: Annotated[Any, NotSupported("structural tags")] = None
    logits_processors: Annotated[Any, NotSupported("client code")] = None
    prompt_embeds: Annotated[Any, NotSupported("prompts of embeddings")] = None
    # in a chat with nothing but `prompt_token_ids`, which are the prompt
    kv_transfer_params: Annotated[Any, NotSupported("KV transfer")] = None
    mm_processor_kwargs: Annotated[Any, NotSupported("input that is not text")] = None
    vllm_xargs: Annotated[Any, NotSupported("arguments of extensions")] = None
    moderation: Annotated[Any, NotSupported("moderation")] = None
    repetition_detection: Annotated[Any, NotSupported("an end at repetitions")] = None
    routed_experts_prompt_start: Annotated[Any, NotSupported("the experts of a prompt")] = None
    return_token_offsets: Annotated[bool | None, NotSupported("places of tokens in the text")] = None
    return_prompt_text: Annotated[bool | None, NotSupported("the rendered prompt")] = None
    return_mm_kwargs: Annotated[bool | None, NotSupported("input that is not text")] = None
    return_weight_versions: Annotated[bool | None, NotSupported("versions of weights")] = None
    ec_transfer_params: Annotated[Any, NotSupported("a transfer of encodings")] = None
    media_io_kwargs: Annotated[Any, NotSupported("input that is not text")] = None
    mm_payload: Annotated[Any, NotSupported("input that is not text")] = None
    watermarking: Annotated[Any, NotSupported("watermarks")] = None
    session_id: Annotated[Any, NotSupported("sessions")] = None
    stream_interval: Annotated[Any, NotSupported("events of several tokens")] = None
