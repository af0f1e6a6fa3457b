"""A step's result on its way: copied behind the step that makes it, read once that is over.

The thread that launches steps never waits; `finish` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from shared.messages.steps import StepResult


class HostTimer:
    """Measures one step, from when it is made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._begin

    def seconds(self) -> float:
        return self._seconds


class DeviceTimer:
    """The same of a step that runs behind the host's back, by events around what is launched in between; `seconds`
    waits for it, and the wait takes no processor."""

    def __init__(self) -> None:
        make: Callable[..., Any] = torch.cuda.Event
        self._begin, self._end = (make(enable_timing=True, blocking=True) for _ in range(2))
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000


StepTimer = HostTimer | DeviceTimer


def start_timer(device: torch.device) -> StepTimer:
    return DeviceTimer() if device.type == "cuda" else HostTimer()


class PendingResult:
    """The result of one step that was launched."""

    def __init__(
        self,
        make_result: Callable[[float], StepResult],
        seconds: Callable[[], float],
        has_ended: Callable[[], bool] = lambda: True,
    ) -> None:
        """`make_result` reads what was sent to the host before; it gets the step's seconds, which are waited for.
        `has_ended`: of a step that is queued, waits for its end unless something else comes up."""
        self._make_result = make_result
        self._seconds = seconds
        self.has_ended = has_ended

    def finish(self) -> StepResult:
        return self._make_result(self._seconds())
