"""Dual batch overlap: two halves of a step take turns, so that one computes while the other's exchange is under way.

The turn passes wherever a half begins to exchange something with other ranks.  So the two exchange in one fixed order,
which is the same at all ranks, and only one of them ever computes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np
import torch

from engine.modeling.batch import StepBatch

Result = TypeVar("Result")


def halves(batch: StepBatch, threshold: int) -> tuple[StepBatch, StepBatch] | None:
    """By sequences, with about as many tokens each; None: fewer tokens than `threshold`, or one sequence."""
    ends = np.cumsum(batch.scheduled)
    if len(batch.rows) < 2 or ends[-1] < threshold:
        return None
    cut = 1 + int(np.argmin(np.abs(2 * ends[:-1] - ends[-1])))
    return _some(batch, slice(cut)), _some(batch, slice(cut, None))


def _some(batch: StepBatch, entries: slice) -> StepBatch:
    columns = {name: getattr(batch, name)[entries] for name in ("rows", "computed", "scheduled", "wanted")}
    return msgspec.structs.replace(batch, **columns)


class DualBatch:
    """Runs two computations in turns: the first one in the caller's thread, the other in a thread of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "second half")
        self._turn = 0
        self._done = [True, True]
        self._may_go_on = (threading.Semaphore(0), threading.Semaphore(0))

    def run(self, first: Callable[[], Result], second: Callable[[], Result]) -> tuple[Result, Result]:
        """Raises what either raises; both have ended then."""
        self._turn, self._done = 0, [False, False]
        later = self._thread.submit(self._second, second, self._stream())
        try:
            found = first()
        finally:
            self._leave(0)
            later.exception()  # waits for it
        return found, later.result()

    def pass_turn(self) -> None:
        """By the computation whose turn it is: returns when it is its turn again.  Outside of `run`, at once."""
        own = self._turn
        if self._done[1 - own]:
            return
        self._turn = 1 - own
        self._may_go_on[1 - own].release()
        self._may_go_on[own].acquire()

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _second(self, compute: Callable[[], Result], stream: contextlib.AbstractContextManager[object]) -> Result:
        self._may_go_on[1].acquire()
        try:
            with torch.inference_mode(), stream:
                return compute()
        finally:
            self._leave(1)

    def _leave(self, own: int) -> None:
        """The other one computes to its end."""
        self._done[own] = True
        if not self._done[1 - own]:
            self._turn = 1 - own
            self._may_go_on[1 - own].release()

    def _stream(self) -> contextlib.AbstractContextManager[object]:
        """Both compute on the caller's stream; what they exchange is on a stream of its own."""
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        stream: contextlib.AbstractContextManager[object] = torch.cuda.stream(torch.cuda.current_stream(self._device))
        return stream
