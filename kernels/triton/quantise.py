"""Rounding to the formats of the KV cache, as `kernels.ops.quantise` says it, for kernels that store."""

from __future__ import annotations

import triton
import triton.language as tl

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
