"""The time that a request has spent in each phase, as it travels with the request."""

from __future__ import annotations

from shared.messages.base import Message


class LatencyBreakdown(Message, frozen=True, tag="Ledger"):  # its tag in recordings of earlier versions
    """A request's time so far, phase by phase.  Phases and reasons are those of shared.tracing.phases, by their
    numbers.
    """

    spent: list[int]  # microseconds by phase; hops may be negative where clocks differ
    stamp: float = 0.0  # Unix seconds when this was sent: the receiver books the time since as the hop
    num_ahead: int = 0  # sequences that waited at its worker when it came
    num_chunks: int = 0  # steps that computed its prompt, and what was lost of it again
    num_preemptions: int = 0
    misses: list[int] = []  # prompt tokens by reason; empty before the cache was asked
    evicted_ago: int = -1  # milliseconds before, the first block of those evicted; -1: none
