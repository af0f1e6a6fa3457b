"""Where the time of a sequence goes while the scheduler has it.  Nothing here changes what is decided.

What waits is not touched at a step.  Each queue adds up its own seconds by cause: why the first of a tenant's queue was
not admitted when it was looked at last.  A sequence notes the sums when it is queued, and books the differences when it
leaves.  In the same way a worker that is idle until drafts come counts its own seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from services.scheduler.state.clocks import COMPUTING, IdleClock, QueueClock, SequenceClock
from services.scheduler.state.sequence import Request, Sequence
from shared.latency import milliseconds
from shared.messages import LatencyBreakdown
from shared.phases import Phase


class Waits:
    """The clocks of one worker's queue, by tenant, and that of its idleness."""

    def __init__(self) -> None:
        self.idle = IdleClock()
        self._clocks: dict[str, QueueClock] = {}

    def __bool__(self) -> bool:
        return bool(self._clocks)

    def of(self, tenant: str, now: float) -> QueueClock:
        if tenant not in self._clocks:
            self._clocks[tenant] = QueueClock(now)
        return self._clocks[tenant]

    def look(self, firsts: Collection[Sequence], cause: Phase, head: Sequence | None, now: float) -> None:
        """The queue was looked at: it went no further than `head`, for that cause.  `firsts`: the next of each tenant.

        Who came before `head`, and yet was not looked at, waits for the sake of fairness.
        """
        still = {}
        for first in firsts:
            tenant = first.request.header.tenant
            clock = still[tenant] = self.of(tenant, now)
            clock.blame(Phase.QUEUE_FAIRNESS if _is_passed_over(first, head) else cause, now)
        self._clocks = still

    def blame(self, cause: Phase, since: float) -> None:
        """All that wait here have waited for this since then, or since they were looked at last."""
        for clock in self._clocks.values():
            clock.blame(cause, max(since, clock.since))


def _is_passed_over(first: Sequence, head: Sequence | None) -> bool:
    return head is not None and first is not head and head.num_cached_tokens < 0 and first.rank < head.rank


def accept(sequences: Iterable[Sequence], latency: LatencyBreakdown, since: float) -> None:
    """Give sequences their accounts: new ones, and those whose client asks for them again.  `since` is when this was
    asked."""
    for sequence in sequences:
        earlier, sequence.clock = sequence.clock, SequenceClock(Phase.QUEUE_STEP, since, latency)
        if earlier is not None:
            sequence.clock.phase = earlier.phase
            sequence.clock._queue, sequence.clock._idle = earlier._queue, earlier._idle
            if earlier._queue is not None:
                sequence.clock._before = earlier._queue.totals(since)


def queued(sequence: Sequence, waits: Waits, num_ahead: int, now: float) -> None:
    """It waits at a worker, behind so many."""
    if (clock := sequence.clock) is not None:
        if sequence.num_cached_tokens < 0:
            clock.num_ahead = num_ahead
        clock.wait(waits.of(sequence.request.header.tenant, now), now)


def passed_over(sequence: Sequence, phase: Phase, now: float) -> None:
    """It could be admitted but for a reason of its own."""
    if (clock := sequence.clock) is not None and clock.phase not in (phase, Phase.PREEMPTED):
        clock.enter(phase, now)


def held_up(sequence: Sequence, waits: Waits, now: float) -> None:
    """It is the one at which the queue stopped: reasons of its own do not count any more."""
    if (clock := sequence.clock) is not None and not clock.is_queued and clock.phase is not Phase.PREEMPTED:
        clock.wait(waits.of(sequence.request.header.tenant, now), now)


def admitted(sequence: Sequence, waits: Waits, now: float) -> None:
    """It runs: for the first time, or again."""
    if (clock := sequence.clock) is not None:
        has_run = sequence.num_cached_tokens >= 0 or sequence.num_output_tokens > 0
        clock.run(Phase.RECOMPUTE if has_run else Phase.PREFILL, waits.idle, now)


def preempted(sequence: Sequence, now: float) -> None:
    if (clock := sequence.clock) is not None:
        clock.num_preemptions += 1
        clock.enter(Phase.PREEMPTED, now)


def on_worker_lost(sequence: Sequence, since: float, now: float) -> None:
    """Its worker is gone, of which nothing was heard since `since`."""
    if (clock := sequence.clock) is not None:
        clock.enter(Phase.LOST, now if clock.is_queued else min(now, max(since, clock.since)))


def searched(sequences: Iterable[Sequence], now: float) -> None:
    """What was computed for a search is there, although nobody is told before its end."""
    for sequence in sequences:
        if (clock := sequence.clock) is not None and clock.phase in COMPUTING:
            clock.told(now)


def ended(sequence: Sequence, now: float) -> None:
    """What was told of its end is on its way; where it has to be told again, that was lost."""
    if (clock := sequence.clock) is not None:
        clock.enter(Phase.LOST, now)


def so_far(request: Request, now: float) -> dict[str, Any]:
    """The phases of a request that ends before its time: those of its first sequence that has not ended, as fields of
    a log line."""
    clock = next((s.clock for s in request.sequences if s.finish_reason is None and s.clock is not None), None)
    return {} if clock is None else {"phases": milliseconds(clock.breakdown(now).spent)}
