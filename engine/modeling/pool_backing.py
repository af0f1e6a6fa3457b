"""Memory behind a KV pool's blocks before a step writes to them: else a long prompt waits for its pages, one by one."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from engine.weights.pages import HUGE, libc

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; an older one refuses, and pages come as they are written to
AHEAD, SHARE = 256 << 20, 4  # bytes, or if that is more a quarter of the pool: what is never used shall take no memory
LEAST_POOL = 32 << 20  # bytes; a smaller pool's pages take too little time to matter
SETTLE = 1.0  # seconds after a start, which other services need
IDLE = 0.02  # seconds after a step
LOOK_EVERY = 0.05  # seconds


class IdleTime:
    """Says when no step computes, which is what the work here waits for."""

    def __init__(self) -> None:
        self._begins = 0.0  # time.monotonic()

    def pause(self) -> None:
        self._begins = float("inf")

    def go_on(self, after: float = IDLE) -> None:
        self._begins = time.monotonic() + after

    def wait(self) -> None:
        while (early := self._begins - time.monotonic()) > 0:
            time.sleep(min(early, LOOK_EVERY))


class PageBacking:
    """Backs the blocks of one pool, some way ahead of the highest one that is used.

    Fresh blocks are given out in that order.  A thread works while there is something to do, and ends.
    """

    def __init__(self, tensors: Sequence[Tensor], num_blocks: int, idle: IdleTime) -> None:
        """`tensors`: each [num_blocks, ...], contiguous."""
        self._tensors = tensors
        self._num_blocks = num_blocks
        self._idle = idle
        self._ahead = _blocks_ahead(tensors, num_blocks)
        self.num_backed = 0 if self._ahead else num_blocks  # blocks that have memory, or are about to get it
        self._thread: threading.Thread | None = None

    def follow(self, num_used: int) -> None:
        """The blocks below `num_used` are in use."""
        if self.num_backed >= min(num_used + self._ahead * 3 // 4, self._num_blocks):
            return
        if self._thread is not None and self._thread.is_alive():
            return
        begin, self.num_backed = max(self.num_backed, num_used), min(num_used + self._ahead, self._num_blocks)
        self._thread = threading.Thread(target=self._back, args=(begin, self.num_backed), name="backing", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """For the thread's end, if there is one."""
        if self._thread is not None:
            self._thread.join()

    def _back(self, begin: int, end: int) -> None:
        for tensor in self._tensors:
            size = tensor.nbytes // self._num_blocks
            for first, last in _pieces(tensor.data_ptr() + begin * size, tensor.data_ptr() + end * size):
                self._idle.wait()
                if libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), POPULATE_WRITE):
                    return


def _blocks_ahead(tensors: Sequence[Tensor], num_blocks: int) -> int:
    """0: none."""
    pool_bytes = sum(tensor.nbytes for tensor in tensors)
    if pool_bytes < LEAST_POOL or any(tensor.device.type != "cpu" for tensor in tensors):
        return 0
    return max(AHEAD * num_blocks // pool_bytes, num_blocks // SHARE)


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Of whole pages: while one is backed, others that change the process's memory wait."""
    for start in range(begin // HUGE * HUGE, end, HUGE):
        yield max(start, begin) // mmap.PAGESIZE * mmap.PAGESIZE, min(start + HUGE, end)
