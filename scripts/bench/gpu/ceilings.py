"""What the card does at best, measured beside what is compared with it, and how launches are timed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

COPY_BYTES = 4 << 30
MATRIX = 8192
ROUNDS = 20


def seconds(run: Callable[[], object], *, rounds: int = ROUNDS, warmups: int = 3) -> float:
    """The median time of what `run` launches, between events on the device."""
    for _ in range(warmups):
        run()
    taken = []
    for _ in range(rounds):
        make: Callable[..., Any] = torch.cuda.Event
        begin, end = (make(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(float(begin.elapsed_time(end)) / 1000)
    return median(taken)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))


def matrix_rate() -> float:
    """Operations per second of a large product in bfloat16, of random numbers."""
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * MATRIX**3 / seconds(lambda: left @ right)
