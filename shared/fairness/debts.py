"""Debts in seconds: a client that has cost much waits before it is served again.  No I/O; the clock is given."""

from __future__ import annotations

import time
from collections.abc import Callable

FEWEST_KEPT = 64


class Debts:
    """What each debtor has still to wait, less a credit that all have: one thing that is just costly is no attack."""

    def __init__(self, credit: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`credit` in seconds."""
        self._credit = credit
        self._clock = clock
        self._ends: dict[str, float] = {}  # by debtor: when all is paid
        self._look_at = FEWEST_KEPT  # entries at which those that are paid are forgotten

    def __len__(self) -> int:
        return len(self._ends)

    def of(self, name: str) -> float:
        """Seconds until a debtor may have more; none or less where that is now."""
        return self._ends.get(name, 0.0) - self._credit - self._clock()

    def charge(self, name: str, seconds: float) -> None:
        now = self._clock()
        if len(self._ends) >= self._look_at:
            self._ends = {debtor: end for debtor, end in self._ends.items() if end > now}
            self._look_at = max(FEWEST_KEPT, 2 * len(self._ends))
        self._ends[name] = max(now, self._ends.get(name, now)) + seconds
