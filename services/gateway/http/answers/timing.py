"""vLLM's times of a request, as its `metrics` field has them: what `explain` tells phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.streams.stream import Stream
from shared.tracing.latency import milliseconds
from shared.tracing.phases import QUEUE, Phase

GENERATING = (Phase.DECODE, Phase.DRAFT_WAIT, Phase.PREEMPTED, Phase.RECOMPUTE)


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Milliseconds of the first sequence."""

    queue_time_ms: float
    time_to_first_token_ms: float  # from the end of the queue, as vLLM counts it
    generation_time_ms: float  # of the tokens behind the first
    mean_itl_ms: float | UnsetType = UNSET  # absent where there is one token
    tokens_per_second: float | UnsetType = UNSET  # since the end of the queue


def metrics_of(streams: Sequence[Stream]) -> RequestMetrics | UnsetType:
    """Absent for several prompts, and where times are not tracked."""
    latency = streams[0].latency if len(streams) == 1 else None
    if latency is None:
        return UNSET
    spent = milliseconds(latency.breakdown().spent)
    first, num_tokens = latency.first or spent, streams[0].num_output_tokens // len(streams[0].sequences)
    prefill, generating = _sum(first, (Phase.PREFILL,)), _sum(spent, GENERATING)
    return RequestMetrics(
        queue_time_ms=_sum(first, QUEUE),
        time_to_first_token_ms=prefill,
        generation_time_ms=generating,
        mean_itl_ms=generating / (num_tokens - 1) if num_tokens > 1 else UNSET,
        tokens_per_second=num_tokens * 1000 / (prefill + generating) if prefill + generating > 0 else UNSET,
    )


def _sum(spent: dict[str, float], phases: Iterable[Phase]) -> float:
    return sum(spent.get(phase.label, 0.0) for phase in phases)
