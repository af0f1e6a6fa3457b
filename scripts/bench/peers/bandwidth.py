"""How fast this machine reads memory now, with a thread on every core: the floor under decoding at batch 1."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Protocol

SOURCE = Path(__file__).with_name("read.c")
NUM_BYTES = 512 << 20  # far beyond any cache
PASSES = 6


class MemoryReader(Protocol):
    how: str

    def measure(self) -> float:
        """Bytes per second: the best of a few passes."""


class CompiledReader:
    """Reads with a few lines of C, made by the compiler that is here."""

    how = f"sum of {NUM_BYTES >> 20} MiB in C, a thread per core, best of {PASSES}"

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            library = Path(directory) / "read.so"
            flags = ["-O3", "-march=native", "-funroll-loops", "-shared", "-fPIC", "-pthread"]
            subprocess.run(["cc", *flags, str(SOURCE), "-o", str(library)], check=True, capture_output=True)
            self._read = ctypes.CDLL(str(library)).read_seconds
        self._read.restype = ctypes.c_double
        self._words = (ctypes.c_uint64 * (NUM_BYTES // 8))()
        ctypes.memset(self._words, 1, NUM_BYTES)  # pages that were never written are all one page of zeros
        self._num_threads = len(os.sched_getaffinity(0))

    def measure(self) -> float:
        total = ctypes.c_uint64()
        count = ctypes.c_size_t(NUM_BYTES // 8)
        times = [self._read(self._words, count, self._num_threads, ctypes.byref(total)) for _ in range(PASSES)]
        return NUM_BYTES / float(min(times))


class TorchReader:
    """The same with torch, where there is no compiler."""

    how = f"torch.sum of {NUM_BYTES >> 20} MiB, best of {PASSES}"

    def __init__(self) -> None:
        import torch

        self._floats = torch.ones(NUM_BYTES // 4)

    def measure(self) -> float:
        import time

        times = []
        for _ in range(PASSES):
            begin = time.perf_counter()
            self._floats.sum()
            times.append(time.perf_counter() - begin)
        return NUM_BYTES / min(times)


def reader() -> MemoryReader:
    try:
        return CompiledReader()
    except (OSError, subprocess.CalledProcessError):
        return TorchReader()
