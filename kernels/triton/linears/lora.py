"""What adapters add to a linear: a launch that reduces each row by its own A, and one that adds its own B.

Each row is a program's own, and sums go in one order of features and ranks: a row's bits do not depend on the others.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.linears.lora import LoraWeights
from kernels.triton.launch import power_of_2

RANKS, FEATURES, COLUMNS = 16, 128, 64  # of one program, at a time


def lora(
    x: Tensor,  # [num_tokens, in_features]
    y: Tensor,  # [num_tokens, out_features], added to
    weights: LoraWeights,
    adapters: Tensor,  # [num_tokens] int64, or negative
) -> Tensor:  # y
    num_tokens, depth = x.shape
    ranks, columns = weights.down.shape[1], weights.up.shape[1]
    x = x if x.stride(-1) == 1 else x.contiguous()
    reduced = torch.empty(num_tokens, ranks, dtype=torch.float32, device=x.device)
    reduce_rows[(num_tokens, triton.cdiv(ranks, RANKS))](
        x, weights.down, weights.scales, adapters, reduced, ranks, depth, x.stride(0),
        RANKS=RANKS, FEATURES=FEATURES, enable_fp_fusion=False,
    )  # fmt: skip
    second, third, fourth = accumulate((*weights.parts, columns, columns)[:3])
    add_rows[(num_tokens, triton.cdiv(columns, COLUMNS))](
        reduced, weights.up, adapters, y, ranks, columns, weights.max_rank, y.stride(0), second, third, fourth,
        COLUMNS=COLUMNS, MOST_RANKS=power_of_2(weights.max_rank), enable_fp_fusion=False,
    )  # fmt: skip
    return y


@triton.jit
def reduce_rows(
    x: tl.tensor,  # [num_tokens, depth]
    down: tl.tensor,  # [num_adapters, num_ranks, depth]
    scales: tl.tensor,  # [num_adapters, num_ranks] float32
    adapters: tl.tensor,  # [num_tokens] int64
    reduced: tl.tensor,  # [num_tokens, num_ranks] float32, written
    num_ranks: int,
    depth: int,
    stride: int,  # of x
    RANKS: tl.constexpr,
    FEATURES: tl.constexpr,
) -> None:
    """reduced [num_tokens, num_ranks] = scales * A x, of one token's RANKS ranks."""
    token = tl.program_id(0).to(tl.int64)
    adapter = tl.load(adapters + token)
    if adapter >= 0:
        ranks = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        features = tl.arange(0, FEATURES)
        rows = down + (adapter * num_ranks + ranks[:, None]) * depth
        total = tl.zeros((RANKS,), dtype=tl.float32)
        for start in range(0, depth, FEATURES):
            inside = start + features < depth
            given = tl.load(x + token * stride + start + features, mask=inside, other=0.0).to(tl.float32)
            known = (ranks < num_ranks)[:, None] & inside[None, :]
            weight = tl.load(rows + start + features[None, :], mask=known, other=0.0).to(tl.float32)
            total += tl.sum(weight * given[None, :], axis=1)
        scale = tl.load(scales + adapter * num_ranks + ranks, mask=ranks < num_ranks, other=0.0)
        tl.store(reduced + token * num_ranks + ranks, total * scale, mask=ranks < num_ranks)


@triton.jit
def add_rows(
    reduced: tl.tensor,  # [num_tokens, num_ranks] float32
    up: tl.tensor,  # [num_adapters, num_columns, max_rank]
    adapters: tl.tensor,  # [num_tokens] int64
    y: tl.tensor,  # [num_tokens, num_columns], added to
    num_ranks: int,
    num_columns: int,
    max_rank: int,
    stride: int,  # of y
    second: int,
    third: int,
    fourth: int,
    COLUMNS: tl.constexpr,
    MOST_RANKS: tl.constexpr,
) -> None:
    """y += B reduced, of one token's COLUMNS output features; those from `second`, `third` and `fourth` on are of other
    parts, which have ranks of their own."""
    token = tl.program_id(0).to(tl.int64)
    adapter = tl.load(adapters + token)
    if adapter >= 0:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        ranks = tl.arange(0, MOST_RANKS)
        inside = columns < num_columns
        known = inside[:, None] & (ranks < max_rank)[None, :]
        part = (columns >= second).to(tl.int32) + (columns >= third).to(tl.int32) + (columns >= fourth).to(tl.int32)
        places = (adapter * num_columns + columns[:, None]) * max_rank + ranks[None, :]
        weight = tl.load(up + places, mask=known, other=0.0)
        given = tl.load(reduced + token * num_ranks + part[:, None] * max_rank + ranks[None, :], mask=known, other=0.0)
        added = tl.sum(weight.to(tl.float32) * given, axis=1)
        where = y + token * stride + columns
        before = tl.load(where, mask=inside, other=0.0)
        tl.store(where, (before.to(tl.float32) + added).to(before.dtype), mask=inside)
