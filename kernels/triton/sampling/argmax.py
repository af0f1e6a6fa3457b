"""The largest of each row, the lowest id among equals: stretches of a row in parallel, then the best of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import num_warps, power_of_2

STRETCH = 4096  # elements of a program


def argmax(
    logits: Tensor,  # [num_rows, vocab_size]
) -> Tensor:  # [num_rows] int64
    num_rows, vocab_size = logits.shape
    num_stretches = triton.cdiv(vocab_size, STRETCH)
    best = logits.new_empty(num_rows, num_stretches, dtype=torch.float32)
    ids = torch.empty(num_rows, num_stretches, dtype=torch.int32, device=logits.device)
    largest_of_stretches[(num_rows, num_stretches)](
        logits, best, ids, vocab_size, logits.stride(0), BLOCK=STRETCH, num_warps=num_warps(STRETCH)
    )
    return best_of_rows(best, ids)


def best_of_rows(
    best: Tensor,  # [num_rows, n] float32 or float64
    ids: Tensor,  # [num_rows, n] int32, growing
) -> Tensor:  # [num_rows] int64: the id of the largest, of equal ones the lowest
    chosen = torch.empty(len(best), dtype=torch.int64, device=best.device)
    block = power_of_2(best.shape[1])
    choose_rows[(len(best),)](best, ids, chosen, best.shape[1], BLOCK=block, num_warps=1)
    return chosen


@triton.jit
def largest_of_stretches(
    logits: tl.tensor,  # [num_rows, vocab_size]
    best: tl.tensor,  # [num_rows, num_stretches] float32
    ids: tl.tensor,  # [num_rows, num_stretches] int32
    vocab_size: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_ids = stretch * BLOCK + tl.arange(0, BLOCK)
    inside = token_ids < vocab_size
    values = tl.load(logits + row * stride + token_ids, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, 0)
    lowest = tl.min(tl.where((values == largest) & inside, token_ids, 0x7FFFFFFF), 0)
    place = row * tl.num_programs(1) + stretch
    tl.store(best + place, largest)
    tl.store(ids + place, lowest)


@triton.jit
def choose_rows(
    best: tl.tensor,  # [num_rows, size]
    ids: tl.tensor,  # [num_rows, size] int32
    chosen: tl.tensor,  # [num_rows] int64
    size: int,
    BLOCK: tl.constexpr,
) -> None:
    """A row without numbers gives token 0."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(best + row * size + columns, mask=inside, other=float("-inf"))
    found = tl.load(ids + row * size + columns, mask=inside, other=0x7FFFFFFF)
    lowest = tl.min(tl.where((values == tl.max(values, 0)) & inside, found, 0x7FFFFFFF), 0)
    tl.store(chosen + row, tl.where(lowest == 0x7FFFFFFF, 0, lowest).to(tl.int64))
