"""What a client gets: plain values, read from the protocol's messages, and the error of a call that failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import msgspec

from protos.pageant.v1 import inference_pb2
from shared.errors import PageantError
from shared.tracing.explanation import Explanation

FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_ABORT: "abort",
}


class Candidate(msgspec.Struct, frozen=True):
    """A token that could have come, with the natural logarithm of its probability."""

    token_id: int
    logprob: float


class TokenScore(msgspec.Struct, frozen=True):
    """One position: the token that came, its rank among all from 1, and the likeliest in order, or those that the
    request names (`logprob_token_ids`)."""

    token: Candidate
    rank: int
    top: list[Candidate]


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one sequence; `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Delta(msgspec.Struct, frozen=True):
    """What is new of one sequence.  The last one of a sequence has a finish reason and its usage; the last of all,
    where that was asked for, an explanation."""

    index: int
    text: str
    token_ids: list[int] = []
    logprobs: list[TokenScore | None] = []
    prompt_logprobs: list[TokenScore | None] = []
    finish_reason: str = ""  # stop, length or abort
    stop_reason: str = ""
    usage: Usage | None = None
    explanation: Explanation | None = None


class GeneratedSequence(msgspec.Struct):
    """One of the n answers, whole."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenScore | None] = []
    prompt_logprobs: list[TokenScore | None] = []
    finish_reason: str = ""
    stop_reason: str = ""
    usage: Usage = Usage()


class Generation(msgspec.Struct, frozen=True):
    """The n answers to one request."""

    request_id: str
    sequences: list[GeneratedSequence]
    explanation: Explanation | None = None  # where its time went, if asked for

    @property
    def text(self) -> str:
        """Of the first."""
        return self.sequences[0].text

    @property
    def usage(self) -> Usage:
        """Of the first."""
        return self.sequences[0].usage


class ModelCard(msgspec.Struct, frozen=True):
    """What is served; lengths in tokens, 0 while no worker is there."""

    name: str
    max_model_len: int
    max_input_length: int
    vocab_size: int


def read_delta(proto: Any) -> Delta:
    """A `GenerateResponse`."""
    usage = None
    if proto.HasField("usage"):
        usage = Usage(proto.usage.prompt_tokens, proto.usage.completion_tokens, proto.usage.cached_tokens)
    return Delta(
        index=proto.index,
        text=proto.text,
        token_ids=list(proto.token_ids),
        logprobs=_scores(proto.logprobs),
        prompt_logprobs=_scores(proto.prompt_logprobs),
        finish_reason=FINISH_REASONS.get(proto.finish_reason, ""),
        stop_reason=proto.stop_reason,
        usage=usage,
        explanation=_explanation(proto.explanation) if proto.HasField("explanation") else None,
    )


def gather(request_id: str, deltas: Iterable[Delta], n: int) -> Generation:
    """Add the deltas of n sequences up."""
    sequences = [GeneratedSequence() for _ in range(n)]
    texts: list[list[str]] = [[] for _ in range(n)]
    explanation = None
    for delta in deltas:
        sequence = sequences[delta.index]
        texts[delta.index].append(delta.text)
        sequence.token_ids += delta.token_ids
        sequence.logprobs += delta.logprobs
        sequence.prompt_logprobs += delta.prompt_logprobs
        if delta.usage is not None:
            sequence.finish_reason, sequence.stop_reason = delta.finish_reason, delta.stop_reason
            sequence.usage = delta.usage
        explanation = delta.explanation or explanation
    for sequence, parts in zip(sequences, texts, strict=True):
        sequence.text = "".join(parts)
    return Generation(request_id, sequences, explanation)


def _explanation(proto: Any) -> Explanation:
    return Explanation(
        phases={entry.phase: entry.ms for entry in proto.phases},
        cause=proto.cause,
        misses={entry.reason: entry.tokens for entry in proto.misses},
        num_ahead=proto.num_ahead,
        num_chunks=proto.num_chunks,
        num_preemptions=proto.num_preemptions,
        evicted_ago_ms=proto.evicted_ago_ms if proto.HasField("evicted_ago_ms") else msgspec.UNSET,
    )


def _scores(protos: Iterable[Any]) -> list[TokenScore | None]:
    return [_score(proto) if proto.HasField("token") else None for proto in protos]


def _score(proto: Any) -> TokenScore:
    top = [Candidate(candidate.token_id, candidate.logprob) for candidate in proto.top]
    return TokenScore(Candidate(proto.token.token_id, proto.token.logprob), proto.rank, top)


class CallError(PageantError):
    """A request that was refused, failed or was ended.

    `code` is gRPC's name of the status, `field` the offending field or empty, `retry_after` seconds or 0.
    """

    def __init__(self, code: str, message: str, *, field: str = "", retry_after: float = 0.0) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.field = field
        self.retry_after = retry_after


def call_error(error: grpc.aio.AioRpcError) -> CallError:
    """The error behind a call's exception."""
    return status_error(error.code().name, error.details(), error.trailing_metadata())


def status_error(code: str, details: str | None, trailing_metadata: Any) -> CallError:
    """The error behind a status and its trailing metadata."""
    metadata: dict[str, Any] = dict(trailing_metadata or ())
    return CallError(
        code,
        details or "",
        field=str(metadata.get("error-field", "")),
        retry_after=int(metadata.get("retry-after-ms", 0)) / 1000,
    )
