"""A loaded library, and whose turn it is."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from kernels.cpu.binding.contents import address_of
from kernels.cpu.binding.queued import CallFlag


class Library:
    """Calls go one at a time: all models of a process share one team of threads."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self._functions = functions
        self._turn = threading.Lock()
        self._num_queued = 0  # the number of the step that was queued last
        self.num_threads = 1
        self.target: str = functions.pg_target().decode()  # the instruction sets that it is compiled for

    def _call(self, function: Any, *arguments: Any) -> None:
        self._answer(function, *arguments)

    def _answer(self, function: Any, *arguments: Any) -> Any:
        with self._turn:
            self._functions.pg_await(self._num_queued, None)  # a step that is queued has the team
            return function(*arguments)

    def await_step(self, number: int, calls: CallFlag | None = None) -> bool:
        """Whether the step of this number is computed, and all that were queued before it: waits for that, unless the
        thread is called."""
        return bool(self._functions.pg_await(number, None if calls is None else calls.flag.ctypes.data))

    def call(self, calls: CallFlag) -> None:
        """Have the thread that waits, or waits next, go on."""
        self._functions.pg_call(calls.flag.ctypes.data)

    @property
    def fast_bfloat16(self) -> bool:
        """Whether it multiplies bfloat16 faster than float32."""
        return "bf16" in self.target

    @property
    def copies_checked(self) -> bool:
        """Whether this processor has the instructions of `copy_checked`."""
        return bool(self._functions.pg_copy_checked(None, None, 0) == 0)

    def copy_checked(self, place: memoryview, source: memoryview) -> int:
        """Fill `place` with as many bytes of `source`; returns their CRC-32.  In any thread, beside a step."""
        if len(source) != len(place):
            raise ValueError(f"{len(source)} bytes for a place of {len(place)}")
        to, origin = np.frombuffer(place, np.uint8), np.frombuffer(source, np.uint8)
        return int(self._functions.pg_copy_checked(address_of(to), address_of(origin), len(place)))

    def set_threads(self, count: int, *, pin: bool) -> None:
        """`pin`: the team's threads keep to one core each; the caller's own is left alone."""
        self._call(self._functions.pg_set_threads, count, pin)
        self.num_threads = count
