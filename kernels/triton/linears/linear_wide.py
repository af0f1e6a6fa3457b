"""Linear layers of codes for many rows: the weight becomes numbers in memory, once, and those are multiplied.

Many rows are bound by arithmetic, and each tile of rows would decode the same codes again.  The numbers lie in memory
only as long as the product takes.  A row's sums go along the input features in the order of `linear_decoded`, through
the same parts, so that its bits do not depend on how many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.linears.decoded_weight import DecodedWeight
from kernels.triton.launch import dot_type
from kernels.triton.linears.linear_codes import number_of

ROWS, COLUMNS, DEPTH = 128, 128, 64  # of a tile
DECODED_COLUMNS = 128  # output features that a program decodes


def decoded(
    weight: DecodedWeight,
    dtype: torch.dtype,
) -> Tensor:  # [in_features, out_features]
    out = torch.empty(weight.in_features, weight.out_features, dtype=dtype, device=weight.codes.device)
    write_numbers[(weight.num_blocks, triton.cdiv(weight.out_features, DECODED_COLUMNS))](
        weight.codes, weight.scales, weight.zeros, out, weight.out_features, weight.in_features,
        KIND=weight.kind, BITS=weight.bits, GROUP=weight.group, SLAB=weight.slab, COLUMNS=DECODED_COLUMNS,
    )  # fmt: skip
    return out


def linear_wide(
    x: Tensor,  # [num_tokens, in_features], of 16 bits
    weight: DecodedWeight,  # [out_features, in_features]
    bias: Tensor | None,  # [out_features]
    parts: int,  # that the input features are cut into
) -> Tensor:  # [num_tokens, out_features]
    numbers = decoded(weight, x.dtype)
    out = torch.empty(len(x), weight.out_features, dtype=x.dtype, device=x.device)
    part = triton.cdiv(weight.num_blocks, parts) * weight.slab * (32 // weight.bits)
    grid = triton.cdiv(len(x), ROWS) * triton.cdiv(weight.out_features, COLUMNS)
    multiply_wide[(grid,)](
        x, numbers, x if bias is None else bias, out, len(x), weight.out_features, weight.in_features, part,
        x.stride(0), BIAS=bias is not None, PARTS=parts, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
        DOT=dot_type(x.dtype), num_warps=8, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def write_numbers(
    codes: tl.tensor,  # as DecodedWeight has them
    scales: tl.tensor,  # [num_groups, out_features] float32
    zeros: tl.tensor,  # [num_groups, out_features] uint8; read of INTEGERS
    out: tl.tensor,  # [depth, out_features], contiguous
    out_features: int,
    depth: int,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SLAB: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    few = tl.arange(0, SLAB)
    there = columns < out_features
    at = (block * SLAB + few)[:, None].to(tl.int64) * out_features + columns[None, :]
    words = tl.load(codes + at, mask=there[None, :], other=0)
    for slab in tl.static_range(32 // BITS):
        first = (block * (32 // BITS) + slab) * SLAB
        place = ((first // GROUP) * out_features + columns)[None, :]
        inside = (there & (first + 0 * columns < depth))[None, :]
        number = number_of(words >> (BITS * slab), scales + place, zeros + place, inside, KIND)
        target = (first + few)[:, None].to(tl.int64) * out_features + columns[None, :]
        held = there[None, :] & (first + few < depth)[:, None]
        tl.store(out + target, number.to(out.dtype.element_ty), mask=held)


@triton.jit
def multiply_wide(
    x: tl.tensor,  # [num_rows, depth]
    weight: tl.tensor,  # [depth, out_features], contiguous
    bias: tl.tensor,  # [out_features]; read where BIAS
    out: tl.tensor,  # [num_rows, out_features], contiguous
    num_rows: int,
    out_features: int,
    depth: int,
    part: int,  # input features of a part, a multiple of DEPTH
    x_stride: int,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Tiles of the same weights follow each other, so that a cache has what the next one reads."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    real, there = rows < num_rows, columns < out_features
    deep = tl.arange(0, DEPTH)
    left = x + rows[:, None].to(tl.int64) * x_stride + deep[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for index in range(PARTS):
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(index * part, tl.minimum((index + 1) * part, depth), DEPTH):
            inside = start + deep < depth
            some = tl.load(left + start, mask=real[:, None] & inside[None, :], other=0.0)
            right = weight + (start + deep)[:, None].to(tl.int64) * out_features + columns[None, :]
            others = tl.load(right, mask=inside[:, None] & there[None, :], other=0.0)
            sums = tl.dot(some.to(DOT), others.to(DOT), sums, input_precision="ieee")
        total = sums if PARTS == 1 else total + sums
    if BIAS:
        total = total + tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)[None, :]
    place = rows[:, None].to(tl.int64) * out_features + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])
