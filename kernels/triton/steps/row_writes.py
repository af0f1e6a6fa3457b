"""Staged writes, a stretch of the values per program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # values of a program


def write_rows(
    table: Tensor,  # [num_rows, width], written
    rows: Tensor,  # [n] int32
    begins: Tensor,  # [n] int32: the first column of each write
    starts: Tensor,  # [n + 1] int32: where each one's values begin; the last: their number
    values: Tensor,  # [num_values] int32; no place is written twice
) -> None:
    if len(values):
        spread[(triton.cdiv(len(values), BLOCK),)](
            table, rows, begins, starts, values, len(rows), len(values), table.stride(0), BLOCK=BLOCK, num_warps=2
        )


@triton.jit
def spread(
    table: tl.tensor,  # [num_rows, width]
    rows: tl.tensor,  # [n] int32
    begins: tl.tensor,  # [n] int32
    starts: tl.tensor,  # [n + 1] int32
    values: tl.tensor,  # [num_values] int32
    num_writes: int,
    num_values: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_values
    low = tl.full((BLOCK,), 0, tl.int32)
    high = low + num_writes
    for _ in range(32):
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= place
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    write = tl.minimum(low, num_writes - 1)
    column = tl.load(begins + write) + place - tl.load(starts + write)
    target = table + tl.load(rows + write).to(tl.int64) * stride + column
    tl.store(target, tl.load(values + place, mask=inside).to(table.dtype.element_ty), mask=inside)
