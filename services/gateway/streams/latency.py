"""Where the time of one call goes: the gateway's own part, and what the other services report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shared.messages import LatencyBreakdown, SequenceText
from shared.tracing.explanation import Explanation, cause, explain, misses_by_name
from shared.tracing.latency import LatencyTracker, arrived, milliseconds
from shared.tracing.phases import Phase


class StreamLatency:
    """Times are Unix seconds; it begins when the client sent the request, where that is known, or when it came.

    A breakdown that comes with output replaces the one before: it began with the one that was sent.  Where a request
    has to be sent again, the time since the last output is booked as lost.
    """

    def __init__(self, arrival: float, clock: Callable[[], float] = time.time, *, sent: float = 0.0) -> None:
        self.begin = sent or arrival
        self.first: dict[str, float] = {}  # milliseconds by phase until the first output came
        self._clock = clock
        self._tracker = LatencyTracker(Phase.FROM_CLIENT, self.begin)
        self._tracker.enter(Phase.GATEWAY, arrival)
        self._misses: tuple[list[int], int] = [], -1  # of the first sequence
        self.heard_at = 0.0  # when the last output came
        self._is_away = False
        self._is_over = False
        self._is_writing = False
        self._last: LatencyBreakdown | None = None  # once it is closed

    def sent(self) -> LatencyBreakdown:
        """The request leaves, for the first time or again: the breakdown to send with it."""
        now, tracker = self._clock(), self._tracker
        if self._is_away:
            self._book_loss(now)
        self._is_away, self._is_over = True, False
        tracker.enter(Phase.UNTOLD, now)
        return tracker.breakdown(now)

    def _book_loss(self, now: float) -> None:
        tracker = self._tracker
        if self.heard_at > tracker.since:
            tracker.enter(Phase.LOST, self.heard_at)
        tracker.phase = Phase.LOST
        tracker.enter(Phase.GATEWAY, now)

    def heard(self, news: SequenceText, now: float, busy_since: float) -> None:
        """Output came that has a breakdown, or is a sequence's last."""
        has_ended = news.finish_reason is not None
        if news.latency is not None:
            phase = Phase.GATEWAY if has_ended else Phase.DECODE
            latency, since = arrived(news.latency, Phase.TO_GATEWAY, now=now, busy_since=busy_since)
            self._tracker = LatencyTracker(phase, since, latency)
            if news.index == 0:
                self._misses = latency.misses, latency.evicted_ago
            if not self.first:
                self.first = milliseconds(latency.spent)
        self._is_over = has_ended
        if has_ended:
            self._tracker.enter(Phase.CLIENT_BLOCKED if self._is_writing else Phase.GATEWAY, now)

    def write_began(self) -> None:
        """The client's connection is given output."""
        self._is_writing = True
        if self._is_over:
            self._tracker.enter(Phase.CLIENT_BLOCKED, self._clock())

    def write_ended(self) -> None:
        """The connection has taken it."""
        if self._is_writing and self._is_over:
            self._tracker.enter(Phase.GATEWAY, self._clock())
        self._is_writing = False

    def close(self) -> None:
        """The client has all output: the breakdown stays as it is from here on."""
        self._last = self.breakdown()

    def breakdown(self) -> LatencyBreakdown:
        """The breakdown as of now."""
        if self._last is not None:
            return self._last
        known = self._tracker.breakdown(self._clock())
        misses, evicted_ago = self._misses
        return LatencyBreakdown(
            known.spent, known.stamp, known.num_ahead, known.num_chunks, known.num_preemptions, misses, evicted_ago
        )

    def explanation(self) -> Explanation:
        """What a client gets that asks for an explanation."""
        return explain(self.breakdown())

    def fields(self) -> dict[str, Any]:
        """Of the log line that ends the call."""
        return self._fields(self.breakdown())

    def _fields(self, latency: LatencyBreakdown) -> dict[str, Any]:
        return {"arrival": self.begin, "phases": milliseconds(latency.spent), "cause": cause(latency)}

    def finished_fields(self) -> dict[str, Any]:
        """The same where all output came."""
        latency = self.breakdown()
        evicted = {"evicted_ago_ms": latency.evicted_ago} if latency.evicted_ago >= 0 else {}
        return {
            **self._fields(latency),
            "first_phases": self.first,
            "misses": misses_by_name(latency),
            **evicted,
            "num_ahead": latency.num_ahead,
            "num_chunks": latency.num_chunks,
            "num_preemptions": latency.num_preemptions,
        }
