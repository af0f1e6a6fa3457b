"""Linear layers in E4M3 on both sides: rows are quantised by one launch, and multiplied by another.

Hopper's matrix units add such products in fewer bits than float32 has, so what they have added is put to sums in
float32 after every STRETCH input features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.linears.linear import LinearWeight
from kernels.triton.launch import MIN_DOT, num_warps, power_of_2
from kernels.triton.linears.linear_int8 import Tile
from kernels.triton.linears.quantise import AT_A_TIME, LARGEST_FP8, factor_of, launch_rows, round_fp8

STRETCH = 128  # input features
MANY_ROWS = 64
MULTIPLE = 16  # of the features that the vendor's library multiplies


def linear(
    x: Tensor,  # [num_tokens, in_features]
    weight: LinearWeight,  # [out_features, in_features] E4M3, with scales
    bias: Tensor | None = None,  # [out_features]
) -> Tensor:  # [num_tokens, out_features]
    assert weight.scales is not None
    num_rows, depth = x.shape
    quantised, scales = quantise_groups(x, weight.group or depth)
    if num_rows > MANY_ROWS and _vendor_takes(x, weight):
        found = torch._scaled_mm(
            quantised, weight.weight.t(), scales.t(), weight.scales, out_dtype=x.dtype, use_fast_accum=False
        )
        return found if bias is None else found.add_(bias)
    out = torch.empty(num_rows, weight.out_features, dtype=x.dtype, device=x.device)
    tile = choose_tile(num_rows)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(weight.out_features, tile.columns)
    multiply_octets[(num_tiles,)](
        quantised, scales, weight.weight, weight.scales, scales if bias is None else bias, out,
        num_rows, weight.out_features, depth, weight.weight.stride(0),
        GROUP=weight.group, BIAS=bias is not None, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=STRETCH,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def quantise_groups(
    x: Tensor,  # [num_tokens, in_features]
    group: int,  # input features of a scale: all, or a multiple of STRETCH
) -> tuple[Tensor, Tensor]:  # E4M3 [num_tokens, in_features], and scales float32 [num_groups, num_tokens]
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, depth = x.shape
    groups = triton.cdiv(depth, group)
    quantised = torch.empty(num_rows, depth, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(groups, num_rows, dtype=torch.float32, device=x.device)
    if groups == 1:
        launch_rows(x, quantised, scales)
    else:
        width = power_of_2(group)
        several = max(1, min(power_of_2(groups), AT_A_TIME // width))
        quantise_groups_of_row[(num_rows, triton.cdiv(groups, several))](
            x, quantised, scales, depth, x.stride(0), groups, num_rows, GROUP=group, WIDTH=width, SEVERAL=several,
            num_warps=num_warps(several * width),
        )  # fmt: skip
    return quantised, scales


def _vendor_takes(x: Tensor, weight: LinearWeight) -> bool:
    """A library that has faster tiles for many rows, but knows no groups; how it sums may depend on their number."""
    whole = not weight.group and x.dtype == torch.bfloat16 and x.device.type == "cuda"
    return whole and not (weight.weight.shape[0] % MULTIPLE or weight.weight.shape[1] % MULTIPLE)


def choose_tile(num_rows: int) -> Tile:
    """As those of int8."""
    if num_rows <= MIN_DOT:
        return Tile(MIN_DOT, 32, STRETCH, 4, 6)
    if num_rows <= 64:
        return Tile(power_of_2(num_rows), 64, STRETCH, 4, 5)
    return Tile(128, 64, STRETCH, 4, 4)


@triton.jit
def quantise_groups_of_row(
    x: tl.tensor,  # [num_rows, depth]
    quantised: tl.tensor,  # [num_rows, depth] E4M3, contiguous
    scales: tl.tensor,  # [num_groups, num_rows] float32, contiguous
    depth: int,
    stride: int,
    num_groups: int,
    num_rows: int,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SEVERAL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * SEVERAL + tl.arange(0, SEVERAL)
    within = tl.arange(0, WIDTH)
    columns = groups[:, None] * GROUP + within[None, :]
    real = (within < GROUP)[None, :] & (columns < depth)
    wide = tl.load(x + row * stride + columns, mask=real, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    octets = round_fp8(wide * factor_of(largest, LARGEST_FP8)[:, None]).to(quantised.dtype.element_ty)
    tl.store(quantised + row * depth + columns, octets, mask=real)
    tl.store(scales + groups.to(tl.int64) * num_rows + row, tl.div_rn(largest, LARGEST_FP8), mask=groups < num_groups)


@triton.jit
def multiply_octets(
    x: tl.tensor,  # [num_rows, depth] E4M3, contiguous
    x_scales: tl.tensor,  # [num_groups, num_rows] float32, contiguous
    weight: tl.tensor,  # [out_features, depth] E4M3
    weight_scales: tl.tensor,  # [num_groups, out_features] float32, contiguous
    bias: tl.tensor,  # [out_features]; read where BIAS
    out: tl.tensor,  # [num_rows, out_features], contiguous
    num_rows: int,
    out_features: int,
    depth: int,
    weight_stride: int,
    GROUP: tl.constexpr,  # input features of a scale; 0: all of them
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Tiles of the same weights follow each other, so that a cache has what the next one reads."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    real, there = rows < num_rows, columns < out_features
    deep = tl.arange(0, DEPTH)
    left = x + rows[:, None].to(tl.int64) * depth + deep[None, :]
    right = weight + columns[None, :].to(tl.int64) * weight_stride + deep[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Scales are asked for a stretch ahead: a compiler does so for what is multiplied alone.
    given = tl.load(x_scales + rows, mask=real, other=0.0)
    factor = tl.load(weight_scales + columns, mask=there, other=0.0)
    for start in range(0, depth, DEPTH):
        if GROUP > 0:
            group = (start + DEPTH) // GROUP
            more = start + DEPTH + 0 * rows < depth
            next_given = tl.load(x_scales + group * num_rows + rows, mask=real & more, other=0.0)
            more = start + DEPTH + 0 * columns < depth
            next_factor = tl.load(weight_scales + group * out_features + columns, mask=there & more, other=0.0)
        inside = start + deep < depth
        some = tl.load(left + start, mask=real[:, None] & inside[None, :], other=0.0)
        others = tl.load(right + start, mask=inside[:, None] & there[None, :], other=0.0)
        sums = tl.dot(some, others, max_num_imprecise_acc=DEPTH)
        if GROUP > 0:
            sums = sums * (factor[None, :] * given[:, None])
            given, factor = next_given, next_factor
        total += sums
    if GROUP == 0:
        total = total * (factor[None, :] * given[:, None])
    if BIAS:
        total = total + tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)[None, :]
    place = rows[:, None].to(tl.int64) * out_features + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])
