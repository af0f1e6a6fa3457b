"""Where the time of one call goes, as its gateway knows it: its own part, and what the troupe tells of the others'."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shared.account import Account, arrived, milliseconds
from shared.explanation import Explanation, cause, explain, misses_by_name
from shared.messages import Ledger, SequenceText
from shared.phases import Phase


class StreamAccount:
    """Times are Unix seconds; it begins when the client sent the request, where that is known, or when it came.

    What comes with output replaces what was known before: it began with what was sent.  Where a request has to be sent
    again, the time since the last word of it is lost.
    """

    def __init__(self, arrival: float, clock: Callable[[], float] = time.time, *, sent: float = 0.0) -> None:
        self.begin = sent or arrival
        self.first: dict[str, float] = {}  # milliseconds by phase until the first output came
        self._clock = clock
        self._account = Account(Phase.FROM_CLIENT, self.begin)
        self._account.enter(Phase.GATEWAY, arrival)
        self._misses: tuple[list[int], int] = [], -1  # of the first sequence, as in a ledger
        self.heard_at = 0.0  # when the last output came
        self._is_away = False
        self._is_over = False
        self._is_writing = False
        self._last: Ledger | None = None  # once it is closed

    def sent(self) -> Ledger:
        """The request leaves, for the first time or again."""
        now, account = self._clock(), self._account
        if self._is_away:
            self._book_loss(now)
        self._is_away, self._is_over = True, False
        account.enter(Phase.UNTOLD, now)
        return account.ledger(now)

    def _book_loss(self, now: float) -> None:
        account = self._account
        if self.heard_at > account.since:
            account.enter(Phase.LOST, self.heard_at)
        account.phase = Phase.LOST
        account.enter(Phase.GATEWAY, now)

    def heard(self, news: SequenceText, now: float, busy_since: float) -> None:
        """Output came that has a ledger, or is a sequence's last."""
        has_ended = news.finish_reason is not None
        if news.ledger is not None:
            phase = Phase.GATEWAY if has_ended else Phase.DECODE
            ledger, since = arrived(news.ledger, Phase.TO_GATEWAY, now=now, busy_since=busy_since)
            self._account = Account(phase, since, ledger)
            if news.index == 0:
                self._misses = ledger.misses, ledger.evicted_ago
            if not self.first:
                self.first = milliseconds(ledger.spent)
        self._is_over = has_ended
        if has_ended:
            self._account.enter(Phase.CLIENT_BLOCKED if self._is_writing else Phase.GATEWAY, now)

    def write_began(self) -> None:
        """The client's connection is given output."""
        self._is_writing = True
        if self._is_over:
            self._account.enter(Phase.CLIENT_BLOCKED, self._clock())

    def write_ended(self) -> None:
        """The connection has taken it."""
        if self._is_writing and self._is_over:
            self._account.enter(Phase.GATEWAY, self._clock())
        self._is_writing = False

    def close(self) -> None:
        """Its client has all of it: whatever is asked from here on, no more time is its own."""
        self._last = self.ledger()

    def ledger(self) -> Ledger:
        """All that is known now."""
        if self._last is not None:
            return self._last
        told = self._account.ledger(self._clock())
        misses, evicted_ago = self._misses
        return Ledger(
            told.spent, told.stamp, told.num_ahead, told.num_chunks, told.num_preemptions, misses, evicted_ago
        )

    def explanation(self) -> Explanation:
        """The same as its client is told."""
        return explain(self.ledger())

    def fields(self) -> dict[str, Any]:
        """Of the log line that ends the call."""
        return self._fields(self.ledger())

    def _fields(self, ledger: Ledger) -> dict[str, Any]:
        return {"arrival": self.begin, "phases": milliseconds(ledger.spent), "cause": cause(ledger)}

    def finished_fields(self) -> dict[str, Any]:
        """The same where all output came."""
        ledger = self.ledger()
        evicted = {"evicted_ago_ms": ledger.evicted_ago} if ledger.evicted_ago >= 0 else {}
        return {
            **self._fields(ledger),
            "first_phases": self.first,
            "misses": misses_by_name(ledger),
            **evicted,
            "num_ahead": ledger.num_ahead,
            "num_chunks": ledger.num_chunks,
            "num_preemptions": ledger.num_preemptions,
        }
