"""A step that a thread of the library computes, behind those queued before it (native/steps/queue.cpp)."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class CallFlag:
    """What one thread that waits for steps looks at."""

    def __init__(self) -> None:
        self.flag: NDArray[np.int32] = np.zeros(1, np.int32)  # 1: it is called


class QueuedStep:
    """Holds what the library writes to, and whatever else must stay until the step is computed; the last reference to
    it waits for that."""

    def __init__(self, functions: ctypes.CDLL, num_tokens: int, *held: object) -> None:
        self.token_ids: Tensor = torch.empty(num_tokens, dtype=torch.int64)  # there behind `wait`
        self.elapsed: NDArray[np.float64] = np.zeros(1)
        self._functions = functions
        self._held = held
        self.number = 0  # of no step yet

    def wait(self) -> None:
        """Until it is computed, and all steps queued before it.  In any thread."""
        self._functions.pg_await(self.number, None)

    def seconds(self) -> float:
        """That it took; waits for it."""
        self.wait()
        return float(self.elapsed[0])

    def __del__(self) -> None:
        self.wait()
