"""Tokens and text on their way out: scheduler -> detokenizer -> gateway."""

from __future__ import annotations

from enum import StrEnum

from shared.messages.base import Message
from shared.messages.latency import LatencyBreakdown
from shared.messages.requests import RequestHeader
from shared.messages.steps import TokenLogprobs


class FinishReason(StrEnum):
    """Why a sequence ended, in the field's words."""

    STOP = "stop"  # end of sequence, stop token or stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"


class OpenStream(Message, frozen=True):
    """One sequence's output stream; known to its detokenizer from here to its finish."""

    header: RequestHeader
    index: int  # which of the request's n sequences
    num_prompt_tokens: int
    prompt_tail: list[int]  # last prompt ids, the decoding context
    stop: list[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    detokenize: bool
    min_tokens: int
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: bytes | None = None  # of the prompt, packed float32, where that is what was asked for
    fingerprint: str = ""  # name of that of the worker that computes it


class SequenceTokens(Message, frozen=True):
    """New tokens of one sequence.  `offset` is how many came before, so that a replay is recognised."""

    request_id: str
    index: int
    offset: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the id that ended it: reported, its text not shown
    num_draft_tokens: int = 0  # verified so far
    num_accepted_tokens: int = 0  # of those
    latency: LatencyBreakdown | None = None  # with the first tokens, those after a recomputation, and the last


class TokenBatch(Message, frozen=True):
    """Everything that one scheduler step sends to one detokenizer."""

    opened: list[OpenStream]
    sequences: list[SequenceTokens]
    closed: list[tuple[str, int]] = []  # aborted: forget them, without an answer
    stamp: float = 0.0  # Unix seconds when the result of the step came


class SequenceText(Message, frozen=True):
    """New text of one sequence; offsets count tokens and characters already sent."""

    request_id: str
    index: int
    token_offset: int
    text_offset: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] = []
    finish_reason: FinishReason | None = None
    stop_reason: str = ""  # the stop string or token id that ended it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # final with finish_reason
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_draft_tokens: int = 0  # final with finish_reason, as the next
    num_accepted_tokens: int = 0
    latency: LatencyBreakdown | None = None  # as in SequenceTokens
    embedding: bytes | None = None  # with the first text
    fingerprint: str = ""  # with the first text: name of that of the worker that computes it


class TextBatch(Message, frozen=True):
    """Everything that one token batch yields for one gateway."""

    sequences: list[SequenceText]


class StopMatched(Message, frozen=True):
    """Detokenizer -> scheduler: a stop string was completed by output token number `num_output_tokens`."""

    request_id: str
    index: int
    num_output_tokens: int


class StreamLost(Message, frozen=True):
    """Detokenizer -> scheduler: tokens came for a stream it does not know; open it again."""

    request_id: str
    index: int
