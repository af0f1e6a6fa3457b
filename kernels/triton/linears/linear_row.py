"""A linear layer of a plain weight for one row, as a decode of one sequence has it.

Such a product is bound by the weight's bytes.  A program has some output features and goes along all input features,
with a sum for each of its places that are added up at the end; matrix units would be idle.  The first stretch of the
weight is asked for before the kernel waits for the one that makes its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.linears.linear import LinearWeight
from kernels.triton.launch import INTERPRETED, place_next, wait_for_others, when

MANY_FEATURES = 16384  # of the output
NUM_WARPS = 4


def linear_row(
    x: Tensor,  # [1, in_features]
    packed: LinearWeight,  # [out_features, in_features], plain
    bias: Tensor | None = None,  # [out_features]
    *,
    early: bool = False,
) -> Tensor:  # [1, out_features]
    weight = packed.weight
    x = x if x.stride(-1) == 1 else x.contiguous()
    out_features, depth = weight.shape
    out = torch.empty(1, out_features, dtype=x.dtype, device=x.device)
    columns, stretch = choose_tile(out_features)
    multiply_row[(triton.cdiv(out_features, columns),)](
        x, weight, x if bias is None else bias, out, out_features, depth, weight.stride(0),
        BIAS=bias is not None, COLUMNS=columns, DEPTH=stretch, num_warps=NUM_WARPS, **when(early, x),
    )  # fmt: skip
    return out


def choose_tile(out_features: int) -> tuple[int, int]:
    """Output features of a program, input features at a time: measured on an H100."""
    if INTERPRETED:  # a program's time is then the interpreter's
        return 128, 1024
    return (2, 2048) if out_features >= MANY_FEATURES else (4, 1024)


@triton.jit
def multiply_row(
    x: tl.tensor,  # [depth]
    weight: tl.tensor,  # [out_features, depth]
    bias: tl.tensor,  # [out_features]; read where BIAS
    out: tl.tensor,  # [out_features]
    out_features: int,
    depth: int,
    stride: int,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < out_features
    deep = tl.arange(0, DEPTH)
    places = weight + columns[:, None].to(tl.int64) * stride + deep[None, :]
    place_next(EARLY)
    some = tl.load(places, mask=there[:, None] & (deep < depth)[None, :], other=0.0)
    wait_for_others(EARLY)
    total = tl.zeros((COLUMNS, DEPTH), tl.float32)
    for start in range(0, depth, DEPTH):
        after = start + DEPTH
        coming = tl.load(places + after, mask=there[:, None] & (after + deep < depth)[None, :], other=0.0)
        given = tl.load(x + start + deep, mask=start + deep < depth, other=0.0)
        total += given.to(tl.float32)[None, :] * some.to(tl.float32)
        some = coming
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=there)
