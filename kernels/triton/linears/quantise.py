"""Rounding to int8 and E4M3, as `kernels.ops.linears.quantise` says it, for kernels that store, and of whole rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import num_warps, power_of_2

AT_A_TIME = 4096  # features
LEVELS = tl.constexpr(127.0)
LARGEST_FP8 = tl.constexpr(448.0)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it keeps no fraction
SMALLEST_NORMAL_FP8 = tl.constexpr(2.0**-6)
FP8_STEP = tl.constexpr(2.0**-9)  # between the numbers below it


@triton.jit
def round_half_even(
    x: tl.tensor,  # float32, |x| < 2**22
) -> tl.tensor:
    return (x + ROUNDER) - ROUNDER


@triton.jit
def round_product(
    x: tl.tensor,  # float32
    factor: tl.tensor,  # float32, |x * factor| < 2**22
) -> tl.tensor:
    """x * factor rounded to float32 and then to an integer.  A product that a compiler joins with the addition of
    ROUNDER would be rounded once, to other integers near halves."""
    return round_half_even(tl.fma(x, factor, tl.zeros_like(x)))


@triton.jit
def round_fp8(
    x: tl.tensor,  # float32
) -> tl.tensor:  # float32 that E4M3 holds exactly: conversions, which targets do differently, then round nothing
    x = tl.minimum(tl.maximum(x, -LARGEST_FP8), LARGEST_FP8)
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    normal = bits.to(tl.float32, bitcast=True)
    small = round_half_even(x / FP8_STEP) * FP8_STEP
    return tl.where(tl.abs(x) < SMALLEST_NORMAL_FP8, small, normal)


def launch_rows(
    x: Tensor,  # [num_rows, size]
    quantised: Tensor,  # [num_rows, size] int8 or E4M3, contiguous; written
    scales: Tensor,  # [num_rows] float32, in one piece; written
) -> None:
    size = x.shape[1]
    block = min(AT_A_TIME, power_of_2(size))
    quantise_row[(len(x),)](
        x, quantised, scales, size, x.stride(0),
        IS_INT8=not quantised.is_floating_point(), BLOCK=block, num_warps=num_warps(block),
    )  # fmt: skip


@triton.jit
def quantise_row(
    x: tl.tensor,  # [num_rows, size]
    quantised: tl.tensor,  # [num_rows, size] int8 or E4M3, contiguous
    scales: tl.tensor,  # [num_rows] float32
    size: int,
    stride: int,
    IS_INT8: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    LARGEST: tl.constexpr = LEVELS if IS_INT8 else LARGEST_FP8
    row = tl.program_id(0).to(tl.int64)
    most = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        wide = tl.load(x + row * stride + columns, mask=columns < size, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(wide))
    largest = tl.max(most, 0)
    factor = factor_of(largest, LARGEST)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        wide = tl.load(x + row * stride + columns, mask=columns < size, other=0.0).to(tl.float32)
        rounded = round_product(wide, factor) if IS_INT8 else round_fp8(wide * factor)
        tl.store(quantised + row * size + columns, rounded.to(quantised.dtype.element_ty), mask=columns < size)
    tl.store(scales + row, tl.div_rn(largest, LARGEST))


@triton.jit
def factor_of(
    largest: tl.tensor,  # float32
    LARGEST: tl.constexpr,  # number of the format
) -> tl.tensor:  # float32: by which the largest number of a row becomes that; 0 where all are 0
    return tl.where(largest > 0.0, tl.div_rn(LARGEST, tl.where(largest > 0.0, largest, 1.0)), 0.0)
