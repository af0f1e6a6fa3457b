"""Where the time of a sequence goes while the scheduler has it.  Nothing here changes what is decided.

What waits is not touched at a step.  Each queue adds up its own seconds by cause: why the first of a tenant's queue was
not admitted when it was looked at last.  A sequence notes the sums when it is queued, and books the differences when it
leaves.  In the same way a worker that is idle until drafts come counts its own seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from shared.account import Account, milliseconds
from shared.messages import Ledger
from shared.phases import NUM_PHASES, Phase

if TYPE_CHECKING:
    from services.scheduler.sequence import Request, Sequence

COMPUTING = (Phase.PREFILL, Phase.RECOMPUTE)  # they end with a token


class QueueClock:
    """Seconds that one tenant's queue at one worker has waited, by cause."""

    __slots__ = ("_spent", "cause", "since")

    def __init__(self, now: float) -> None:
        self.cause = Phase.QUEUE_STEP
        self.since = now
        self._spent = [0.0] * NUM_PHASES

    def blame(self, cause: Phase, now: float) -> None:
        """It has waited for what it waited for until now; from here on it waits for `cause`."""
        self._spent[self.cause] += now - self.since
        self.cause, self.since = cause, now

    def totals(self, now: float) -> list[float]:
        """Until now, once and for all: what is blamed later for the time before changes none that were read."""
        self.blame(self.cause, now)
        return self._spent.copy()


class IdleClock:
    """Seconds that a worker has had nothing to do because drafts were waited for."""

    __slots__ = ("_seconds", "_since")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """Does nothing where it has begun."""
        if self._since is None:
            self._since = now

    def end(self, now: float) -> None:
        if self._since is not None:
            self._seconds += now - self._since
            self._since = None

    def total(self, now: float) -> float:
        return self._seconds if self._since is None else self._seconds + now - self._since


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


class SequenceClock(Account):
    """One sequence's account.  While it waits in a queue its phase stands for whatever its queue waits for."""

    __slots__ = ("_before", "_idle", "_idle_before", "_is_retold", "_queue", "is_due")

    def __init__(self, phase: Phase, since: float, ledger: Ledger) -> None:
        super().__init__(phase, since, ledger)
        self.is_due = True  # whether the next tokens carry the ledger
        self._is_retold = False
        self._queue: QueueClock | None = None
        self._before: list[float] = []
        self._idle: IdleClock | None = None
        self._idle_before = 0.0

    @property
    def is_queued(self) -> bool:
        return self._queue is not None

    def wait(self, queue: QueueClock, now: float) -> None:
        """It waits with its queue."""
        self.enter(Phase.QUEUE_STEP, now)
        self._queue, self._before = queue, queue.totals(now)

    def run(self, phase: Phase, idle: IdleClock, now: float) -> None:
        """It is admitted at a worker whose idleness is counted by `idle`."""
        self.enter(phase, now)
        self._idle, self._idle_before = idle, idle.total(now)
        self.is_due = True

    def enter(self, phase: Phase, now: float) -> None:
        self._share_out(now)
        super().enter(phase, now)
        self._queue = None
        if phase is not Phase.DECODE:
            self._idle = None

    def _share_out(self, now: float) -> None:
        """Book what others have counted of the time under way."""
        if self._queue is not None:
            totals = self._queue.totals(now)
            for phase, (before, after) in enumerate(zip(self._before, totals, strict=True)):
                if after != before:
                    self.book(Phase(phase), after - before)
            self._before = totals
        elif self._idle is not None:
            total = self._idle.total(now)
            if total != self._idle_before:
                self.book(Phase.DRAFT_WAIT, total - self._idle_before)
            self._idle_before = total

    def ledger(self, now: float) -> Ledger:
        self._share_out(now)
        return super().ledger(now)

    def told(self, now: float) -> Ledger:
        """The ledger that goes with tokens: with them, what was computed is there."""
        if self.phase in COMPUTING and not self._is_retold:
            self.num_chunks += 1
            self.enter(Phase.DECODE, now)
        self._is_retold = False
        self.is_due = self.phase in COMPUTING
        return self.ledger(now)

    def retell(self) -> None:
        """Tokens that were told before are told again: that says nothing of how far the sequence is."""
        self.is_due = self._is_retold = True


def accept(sequences: Iterable[Sequence], ledger: Ledger, since: float) -> None:
    """Give sequences their accounts: new ones, and those whose client asks for them again.  `since` is when this was
    asked."""
    for sequence in sequences:
        earlier, sequence.clock = sequence.clock, SequenceClock(Phase.QUEUE_STEP, since, ledger)
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


def bereft(sequence: Sequence, since: float, now: float) -> None:
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
    return {} if clock is None else {"phases": milliseconds(clock.ledger(now).spent)}
