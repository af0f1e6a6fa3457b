"""Clocks of waiting and computing; `phases.py` starts and stops them."""

from __future__ import annotations

from shared.messages import LatencyBreakdown
from shared.tracing.latency import LatencyTracker
from shared.tracing.phases import NUM_PHASES, Phase

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


class SequenceClock(LatencyTracker):
    """One sequence's account.  While it waits in a queue, its queue counts the time by cause."""

    __slots__ = ("_before", "_idle", "_idle_before", "_is_retold", "_queue", "is_due")

    def __init__(self, phase: Phase, since: float, latency: LatencyBreakdown) -> None:
        super().__init__(phase, since, latency)
        self.is_due = True  # whether the next tokens carry the latency
        self._is_retold = False
        self._queue: QueueClock | None = None
        self._before: list[float] = []
        self._idle: IdleClock | None = None
        self._idle_before = 0.0

    @property
    def is_queued(self) -> bool:
        return self._queue is not None

    def follow(self, earlier: SequenceClock, now: float) -> None:
        """Go on where an earlier clock of the same sequence stands: its client has asked again."""
        self.phase = earlier.phase
        self._queue, self._idle = earlier._queue, earlier._idle
        if earlier._queue is not None:
            self._before = earlier._queue.totals(now)

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

    def breakdown(self, now: float) -> LatencyBreakdown:
        self._share_out(now)
        return super().breakdown(now)

    def told(self, now: float) -> LatencyBreakdown:
        """The latency that is sent with tokens, which end the computing phases."""
        if self.phase in COMPUTING and not self._is_retold:
            self.num_chunks += 1
            self.enter(Phase.DECODE, now)
        self._is_retold = False
        self.is_due = self.phase in COMPUTING
        return self.breakdown(now)

    def retell(self) -> None:
        """Tokens that were sent before are sent again: the phase of the sequence does not change."""
        self.is_due = self._is_retold = True
