"""A throttle for flushing output to clients: at once, unless sending takes more than its share of the machine.

It knows streams only as something to wake.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

MAX_REST = 0.1  # seconds that output waits at most
SHORT = 0.5  # of the time between outputs: a round that costs no more is no reason to wait, however large
SMOOTHING = 0.1  # weight of the newest time between outputs
FEW = 8  # senders in a round after which there is no rest: there would be little to gather


def stretch() -> float:
    """How many times the processor time of a round passes before the next: sending takes a quarter of a core where
    there are two, which the model needs, and nearly all of one where there are many."""
    return 1 + 6 / len(os.sched_getaffinity(0))


class Sender(Protocol):
    def wake(self, sent: Callable[[], None]) -> bool:
        """Begin to send the queued output, and call `sent` when that is done.

        False where it begins nothing now: it has no output, or its reader is slow and it still sends what came before.
        """


@dataclass(slots=True)
class Round:
    """Senders that were woken together."""

    began: float
    spent_before: float  # seconds of a processor by this process until it began
    num_woken: int = 0
    num_sending: int = 0
    cost: float | None = None  # seconds of a processor; None while a sender is sending


class FlushThrottle:
    """Wakes senders in rounds.

    While rounds are short beside the time between outputs, nothing waits: a rest that ends just after the next output
    came would cost its tokens a delay and save nothing.  When a gateway is behind, it rests after each round: what
    arrives meanwhile leaves in one message per stream, where otherwise ever more messages would take the processor from
    the services that make the tokens.

    A round costs what was spent until its last sender had sent.  What the gateway does after that, such as to read a
    request of a megabyte, is nothing that streams should wait for.
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
        self._has_news = False
        self._last_news = clock()
        self._interval = 0.0  # seconds between outputs
        self._round = Round(0.0, 0.0, cost=0.0)

    def add(self, sender: Sender) -> None:
        """Have a sender that has output woken in the next round."""
        self._senders[sender] = None
        self._has_news = True

    def rest(self) -> float:
        """Seconds until the next round may begin; none or less: now."""
        last = self._round
        if last.num_woken <= FEW:
            return 0.0
        cost = self._spent() - last.spent_before if last.cost is None else last.cost
        if cost <= SHORT * self._interval:
            return 0.0
        return min(MAX_REST, last.began + self._stretch * cost - self._clock())

    def release(self) -> None:
        """Begin a round, or see to it that one begins when it may."""
        if self._has_news:
            self._note_news()
        if not self._senders or self._timer is not None:
            return
        if (seconds := self.rest()) > 0:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._begin)
        else:
            self._begin()

    def _note_news(self) -> None:
        now = self._clock()
        self._interval += SMOOTHING * (min(MAX_REST, now - self._last_news) - self._interval)
        self._last_news, self._has_news = now, False

    def _begin(self) -> None:
        self._timer = None
        senders, self._senders = self._senders, {}
        self._round = Round(self._clock(), self._spent(), num_woken=len(senders))
        sent = partial(self._sent, self._round)
        self._round.num_sending = sum(sender.wake(sent) for sender in senders)
        if not self._round.num_sending:
            self._round.cost = 0.0

    def _sent(self, round: Round) -> None:
        round.num_sending -= 1
        if round.num_sending == 0:
            round.cost = self._spent() - round.spent_before
