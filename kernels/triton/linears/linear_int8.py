"""Linear layers in int8 on both sides: rows are quantised by one launch, and multiplied by another.

Sums of integers are exact in any order, so the result has the reference's bits, and a row's does not depend on those
beside it.  A decode reads the weight once, half of bfloat16's bytes; a prompt's products go to the matrix units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.linears.linear import LinearWeight
from kernels.triton.launch import MIN_DOT, power_of_2
from kernels.triton.linears.quantise import launch_rows


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program multiplies, and how it is launched."""

    rows: int
    columns: int  # features of the output
    depth: int  # features of the input at a time
    num_warps: int
    num_stages: int


def linear(
    x: Tensor,  # [num_tokens, in_features]
    weight: LinearWeight,  # [out_features, in_features] int8, with scales
    bias: Tensor | None = None,  # [out_features]
) -> Tensor:  # [num_tokens, out_features]
    assert weight.scales is not None
    num_rows, depth = x.shape
    quantised, scales = quantise_rows(x)
    out = torch.empty(num_rows, weight.out_features, dtype=x.dtype, device=x.device)
    tile = choose_tile(num_rows)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(weight.out_features, tile.columns)
    multiply_tiles[(num_tiles,)](
        quantised, scales, weight.weight, weight.scales, scales if bias is None else bias, out,
        num_rows, weight.out_features, depth, weight.weight.stride(0),
        BIAS=bias is not None, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def quantise_rows(
    x: Tensor,  # [num_tokens, in_features]
) -> tuple[Tensor, Tensor]:  # int8 [num_tokens, in_features], and scales float32 [num_tokens]
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, size = x.shape
    quantised = torch.empty(num_rows, size, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    launch_rows(x, quantised, scales)
    return quantised, scales


def choose_tile(num_rows: int) -> Tile:
    """Few rows are bound by the weight's bytes: narrow tiles, so that all multiprocessors read, and deep pipelines."""
    if num_rows <= MIN_DOT:
        return Tile(MIN_DOT, 32, 256, 4, 5)
    if num_rows <= 64:
        return Tile(power_of_2(num_rows), 64, 128, 4, 4)
    return Tile(128, 128, 128, 8, 3)


@triton.jit
def multiply_tiles(
    x: tl.tensor,  # [num_rows, depth] int8, contiguous
    x_scales: tl.tensor,  # [num_rows] float32
    weight: tl.tensor,  # [out_features, depth] int8
    weight_scales: tl.tensor,  # [out_features] float32
    bias: tl.tensor,  # [out_features]; read where BIAS
    out: tl.tensor,  # [num_rows, out_features], contiguous
    num_rows: int,
    out_features: int,
    depth: int,
    weight_stride: int,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Tiles of the same weights follow each other, so that a cache has what the next one reads."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    tile = tl.program_id(0)
    rows = (tile % row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tile // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    left = x + rows[:, None].to(tl.int64) * depth + deep[None, :]
    right = weight + columns[None, :].to(tl.int64) * weight_stride + deep[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, depth, DEPTH):
        inside = start + deep < depth
        some = tl.load(left + start, mask=(rows < num_rows)[:, None] & inside[None, :], other=0)
        others = tl.load(right + start, mask=inside[:, None] & (columns < out_features)[None, :], other=0)
        total = tl.dot(some, others, total, out_dtype=tl.int32)
    there = columns < out_features
    scaled = total.to(tl.float32) * tl.load(weight_scales + columns, mask=there, other=0.0)[None, :]
    scaled = scaled * tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)[:, None]
    if BIAS:
        scaled = scaled + tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)[None, :]
    place = rows[:, None].to(tl.int64) * out_features + columns[None, :]
    tl.store(out + place, scaled.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & there[None, :])
