"""A step's tokens, positions and slots, gathered where the newest tokens were sampled and the block tables are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # tokens of a program


def step_inputs(
    tokens: Tensor,  # [num_rows, longest] int64 histories
    block_tables: Tensor,  # [num_rows, max_num_blocks] int32
    rows: Tensor,  # [num_seqs] int32
    computed: Tensor,  # [num_seqs] int32: the position of each one's first token
    starts: Tensor,  # [num_seqs + 1] int32: where each one's tokens begin in the step; the last: their number
    block_size: int,
    num_tokens: int,  # of the step, with padding: token 0 at position 0, with a slot below zero
) -> tuple[Tensor, Tensor, Tensor]:  # token ids, positions, slots: each [num_tokens] int64
    found = torch.empty(3, num_tokens, dtype=torch.int64, device=tokens.device)
    gather_inputs[(triton.cdiv(num_tokens, BLOCK),)](
        tokens, block_tables, rows, computed, starts, found, len(rows), num_tokens,
        tokens.stride(0), block_tables.stride(0), BLOCK_SIZE=block_size, BLOCK=BLOCK, num_warps=2,
    )  # fmt: skip
    return found[0], found[1], found[2]


@triton.jit
def gather_inputs(
    tokens: tl.tensor,  # [num_rows, longest] int64
    block_tables: tl.tensor,  # [num_rows, max_num_blocks] int32
    rows: tl.tensor,  # [num_seqs] int32
    computed: tl.tensor,  # [num_seqs] int32
    starts: tl.tensor,  # [num_seqs + 1] int32
    found: tl.tensor,  # [3, num_tokens] int64
    num_seqs: int,
    num_tokens: int,
    token_stride: int,
    table_stride: int,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_tokens
    low = tl.full((BLOCK,), 0, tl.int32)  # the last entry that begins at or before the place, by bisection
    high = low + num_seqs
    for _ in range(32):
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= place
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    entry = tl.minimum(low, num_seqs - 1)
    real = inside & (place < tl.load(starts + num_seqs))
    row = tl.load(rows + entry).to(tl.int64)
    position = tl.where(real, tl.load(computed + entry) + place - tl.load(starts + entry), 0)
    block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    token = tl.load(tokens + row * token_stride + position, mask=real, other=0)
    tl.store(found + place, token, mask=inside)
    tl.store(found + num_tokens + place, position.to(tl.int64), mask=inside)
    slot = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(found + 2 * num_tokens + place, slot, mask=inside)
