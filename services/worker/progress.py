"""How long the current step takes, and how long a step of its size may take: tells a busy worker from a stuck one."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.messages import StepPlan

PATIENCE = 4  # times as long as the slowest step of that size so far
HOPELESS = 12  # times the limit of a stalled step, after which the worker ends


class StepWatch:
    """Written by the step thread, read by the event loop.

    Steps are compared with those of the same number of binary digits in their tokens, or with smaller ones, scaled: a
    long prompt on a slow machine takes many seconds and is no stall.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slowest: dict[int, float] = {}  # seconds, by binary digits of the number of tokens
        self._current: tuple[float, int] | None = None  # start, number of tokens

    def begin(self, plan: StepPlan) -> None:
        self._current = self._clock(), sum(plan.num_scheduled_tokens)

    def end(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            since, num_tokens = current
            digits = num_tokens.bit_length()
            self._slowest[digits] = max(self._slowest.get(digits, 0.0), self._clock() - since)

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
