"""Memory by the page: zeros that are not there until they are written, and pages given back once they were read."""

from __future__ import annotations

import ctypes
import functools
import mmap

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of a large page
DONTNEED = 4  # MADV_DONTNEED of Linux


class Arena:
    """One stretch of pages, zero and not there until they are written first, given out in pieces.

    In one stretch, because large pages are used where there is that much of it, and are there as a whole.
    """

    def __init__(self, size: int) -> None:
        pages = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE
        self._memory = whole[start : start + size]
        self._used = 0

    @property
    def size(self) -> int:
        return self._memory.numel()

    def clear(self) -> None:
        """All pieces are free again, and as they were left."""
        self._used = 0

    def take(self, size: int) -> Tensor:  # [size] uint8, at a multiple of 64 bytes
        start = self._used
        self._used += padded(size)
        return self._memory[start : start + size]


def padded(size: int) -> int:
    """What a piece of `size` bytes takes of an arena."""
    return -(-size // 64) * 64


def drop_pages(tensor: Tensor) -> None:
    """Give back the memory of a tensor that lies in a mapped file and is done with; reading it would fetch it again."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), DONTNEED)


@functools.cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
