"""How long the current step takes, and how long a step of its size may take: tells a busy worker from a stuck one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from shared.messages import StepPlan

PATIENCE = 4  # times as long as the slowest step of that size so far
HOPELESS = 12  # times the limit of a stalled step, after which the worker ends


class StepWatch:
    """Written by the threads of steps, read by the event loop.  Of steps that were begun one is computed, the oldest.

    Steps are compared with those of the same number of binary digits in their tokens, or with smaller ones, scaled: a
    long prompt on a slow machine takes many seconds and is no stall.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slowest: dict[int, float] = {}  # seconds, by binary digits of the number of tokens
        self._current: tuple[float, int] | None = None  # start, number of tokens
        self._begun: deque[int] = deque()  # numbers of tokens, the current step's too
        self._writing = threading.Lock()

    def begin(self, plan: StepPlan) -> None:
        with self._writing:
            self._begun.append(sum(plan.num_scheduled_tokens))
            if self._current is None:
                self._current = self._clock(), self._begun[0]

    def end(self) -> None:
        """The oldest one has ended."""
        with self._writing:
            if self._current is None:
                return
            since, num_tokens = self._current
            now, digits = self._clock(), num_tokens.bit_length()
            self._slowest[digits] = max(self._slowest.get(digits, 0.0), now - since)
            self._begun.popleft()
            self._current = (now, self._begun[0]) if self._begun else None

    @property
    def seconds(self) -> float:
        """Seconds that the current step has taken so far; 0 where there is none."""
        current = self._current
        return self._clock() - current[0] if current is not None else 0.0

    def limit(self, timeout: float) -> float:
        """Seconds after which the current step is stalled; at least `timeout`."""
        current = self._current
        return timeout + PATIENCE * (self._expected(current[1], timeout) if current is not None else 0.0)

    def is_stalled(self, timeout: float) -> bool:
        return self.seconds > self.limit(timeout)

    def is_hopeless(self, timeout: float) -> bool:
        return self.seconds > HOPELESS * self.limit(timeout)

    def is_computing(self, timeout: float) -> bool:
        return self._current is not None and not self.is_stalled(timeout)

    def _expected(self, num_tokens: int, unknown: float) -> float:
        """Seconds of the slowest step of that size, or scaled from the next smaller size; `unknown` before any step."""
        digits = num_tokens.bit_length()
        smaller = [known for known in self._slowest if known <= digits]
        if not smaller:
            return unknown
        nearest = max(smaller)
        return self._slowest[nearest] * (1 << (digits - nearest))
