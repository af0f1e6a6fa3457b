"""When the streams that have output may send it: at once, unless sending takes more than its share of the machine.

Knows streams only as something to wake.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Protocol

MAX_REST = 0.1  # seconds that output waits at most
FEW = 8  # senders in a round after which there is no rest: there would be little to gather


def stretch() -> float:
    """How many times the processor time of a round passes before the next: sending takes a quarter of a core where
    there are two, which the model needs, and nearly all of one where there are many."""
    return 1 + 6 / len(os.sched_getaffinity(0))


class Sender(Protocol):
    def wake(self) -> None:
        """Let it send what it has."""


class Pace:
    """Wakes senders in rounds.

    While rounds are short beside the time between outputs, nothing waits.  When a gateway is behind, it rests after
    each round: what arrives meanwhile leaves in one message per stream, where otherwise ever more messages would take
    the processor from those who make the tokens.
    """

    def __init__(
        self,
        *,
        stretch: float,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.process_time,
    ) -> None:
        self._stretch = stretch
        self._clock = clock
        self._spent = spent
        self._senders: dict[Sender, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._began = self._spent_then = 0.0
        self._num_woken = 0

    def add(self, sender: Sender) -> None:
        """It has output; it is woken with the next round."""
        self._senders[sender] = None

    def rest(self) -> float:
        """Seconds until the next round may begin; none or less: now."""
        if self._num_woken <= FEW:
            return 0.0
        due = self._began + self._stretch * (self._spent() - self._spent_then)
        return min(MAX_REST, due - self._clock())

    def release(self) -> None:
        """Begin a round, or see to it that one begins when it may."""
        if not self._senders or self._timer is not None:
            return
        if (seconds := self.rest()) > 0:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        self._timer = None
        self._began, self._spent_then = self._clock(), self._spent()
        senders, self._senders = self._senders, {}
        self._num_woken = len(senders)
        for sender in senders:
            sender.wake()
