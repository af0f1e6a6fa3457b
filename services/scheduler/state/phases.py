"""Where the time of a sequence goes while the scheduler has it.  Nothing here changes what is decided.

What waits is not touched at a step.  Each queue adds up its own seconds by cause: why the first of a tenant's queue was
not admitted when it was looked at last.  A sequence notes the sums when it is queued, and books the differences when it
leaves.  In the same way a worker that is idle until drafts come counts its own seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from services.scheduler.blocks.clock import Clock
from services.scheduler.state.clocks import COMPUTING, IdleClock, QueueClock, SequenceClock
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Request, Sequence
from shared.messages import LatencyBreakdown
from shared.tracing.latency import arrived, milliseconds
from shared.tracing.phases import Phase


class WorkerClocks:
    """The clocks of one worker's queue, by tenant, that of its idleness, and when it was heard of last."""

    def __init__(self, now: float) -> None:
        self.idle = IdleClock()
        self.heard_at = now  # when it joined, or answered last
        self._queues: dict[str, QueueClock] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def of(self, tenant: str, now: float) -> QueueClock:
        if tenant not in self._queues:
            self._queues[tenant] = QueueClock(now)
        return self._queues[tenant]

    def look(self, firsts: Collection[Sequence], cause: Phase, head: Sequence | None, now: float) -> None:
        """The queue was looked at: it went no further than `head`, for that cause.  `firsts`: the next of each tenant.

        A sequence that comes before `head`, and yet was not looked at, waits for the sake of fairness.
        """
        still = {}
        for first in firsts:
            tenant = first.tenant
            clock = still[tenant] = self.of(tenant, now)
            clock.blame(Phase.QUEUE_FAIRNESS if _is_passed_over(first, head) else cause, now)
        self._queues = still

    def blame(self, cause: Phase, since: float) -> None:
        """All that wait here have waited for this since then, or since they were looked at last."""
        for clock in self._queues.values():
            clock.blame(cause, max(since, clock.since))


def _is_passed_over(first: Sequence, head: Sequence | None) -> bool:
    return head is not None and first is not head and head.num_cached_tokens < 0 and first.rank < head.rank


class TimeAccounts:
    """The clocks of the sequences whose clients ask for latencies, and of the workers.

    Invariant: every replica of the scheduler has its clocks; a sequence that was let go has none.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.sequences: dict[Sequence, SequenceClock] = {}
        self.workers: dict[Replica, WorkerClocks] = {}

    def add_worker(self, replica: Replica) -> None:
        self.workers[replica] = WorkerClocks(self.clock.now)

    def forget(self, sequence: Sequence) -> None:
        self.sequences.pop(sequence, None)

    # -- what happens to a sequence

    def track(self, sequences: Iterable[Sequence], latency: LatencyBreakdown | None) -> None:
        """From now on their time is accounted for, if their client asks for latencies."""
        if latency is not None:
            now = self.clock.now
            self.accept(sequences, *arrived(latency, Phase.TO_SCHEDULER, now=now, busy_since=now))

    def accept(self, sequences: Iterable[Sequence], latency: LatencyBreakdown, since: float) -> None:
        """Give sequences their accounts: new ones, and those whose client asks for them again.  `since` is when this
        was asked."""
        for sequence in sequences:
            earlier = self.sequences.get(sequence)
            clock = self.sequences[sequence] = SequenceClock(Phase.QUEUE_STEP, since, latency)
            if earlier is not None:
                clock.follow(earlier, since)

    def queued(self, sequence: Sequence, replica: Replica) -> None:
        """It is about to wait at a worker, behind those that wait there."""
        if (clock := self.sequences.get(sequence)) is not None:
            if sequence.num_cached_tokens < 0:
                clock.num_ahead = len(replica.waiting)
            self._wait(clock, sequence, replica)

    def _wait(self, clock: SequenceClock, sequence: Sequence, replica: Replica) -> None:
        now = self.clock.now
        clock.wait(self.workers[replica].of(sequence.tenant, now), now)

    def passed_over(self, sequence: Sequence, phase: Phase) -> None:
        """It could be admitted but for a reason of its own."""
        clock = self.sequences.get(sequence)
        if clock is not None and clock.phase not in (phase, Phase.PREEMPTED):
            clock.enter(phase, self.clock.now)

    def held_up(self, sequence: Sequence, replica: Replica) -> None:
        """It is the one at which the queue stopped: reasons of its own do not count any more."""
        clock = self.sequences.get(sequence)
        if clock is not None and not clock.is_queued and clock.phase is not Phase.PREEMPTED:
            self._wait(clock, sequence, replica)

    def admitted(self, sequence: Sequence, replica: Replica) -> None:
        """It runs: for the first time, or again."""
        if (clock := self.sequences.get(sequence)) is not None:
            has_run = sequence.num_cached_tokens >= 0 or sequence.num_output_tokens > 0
            clock.run(Phase.RECOMPUTE if has_run else Phase.PREFILL, self.workers[replica].idle, self.clock.now)

    def computed_in_part(self, sequence: Sequence) -> None:
        """A chunk of its prompt is in a plan."""
        if (clock := self.sequences.get(sequence)) is not None:
            clock.num_chunks += 1

    def preempted(self, sequence: Sequence) -> None:
        if (clock := self.sequences.get(sequence)) is not None:
            clock.num_preemptions += 1
            clock.enter(Phase.PREEMPTED, self.clock.now)

    def lost_worker(self, sequence: Sequence, since: float) -> None:
        """The worker of this request was lost; its last message came at `since`."""
        if (clock := self.sequences.get(sequence)) is not None:
            now = self.clock.now
            clock.enter(Phase.LOST, now if clock.is_queued else min(now, max(since, clock.since)))

    def searched(self, sequences: Iterable[Sequence]) -> None:
        """What was computed for a search is there, although its client gets nothing before the end."""
        for sequence in sequences:
            if (clock := self.sequences.get(sequence)) is not None and clock.phase in COMPUTING:
                clock.told(self.clock.now)

    def concluded(self, sequences: Iterable[Sequence], first: Sequence) -> None:
        """The sequences of a search that is over have the time of its first one."""
        if (clock := self.sequences.get(first)) is not None:
            for sequence in sequences:
                self.sequences[sequence] = clock

    def due(self, sequence: Sequence) -> None:
        """The next tokens carry the latency."""
        if (clock := self.sequences.get(sequence)) is not None:
            clock.is_due = True

    def retell(self, sequence: Sequence) -> None:
        """Tokens that were sent before are sent again."""
        if (clock := self.sequences.get(sequence)) is not None:
            clock.retell()

    def ended(self, sequence: Sequence) -> None:
        """The message of its end is on its way; where it has to be sent again, that was lost."""
        if (clock := self.sequences.get(sequence)) is not None:
            clock.enter(Phase.LOST, self.clock.now)

    def so_far(self, request: Request) -> dict[str, Any]:
        """The phases of a request that ends before its time: those of its first sequence that has not ended, as fields
        of a log line."""
        unfinished = (sequence for sequence in request.sequences if sequence.finish_reason is None)
        clock = next((self.sequences[sequence] for sequence in unfinished if sequence in self.sequences), None)
        return {} if clock is None else {"phases": milliseconds(clock.breakdown(self.clock.now).spent)}
