"""The noise of `kernels.ops.sampling.noise` in registers: the same bits, with uint32 wrapping where the reference
masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.sampling import noise

STEP = tl.constexpr(noise.TOKEN_STEP)
UNIT = tl.constexpr(noise.UNIT)


@triton.jit
def mix(
    word: tl.tensor,  # uint32
) -> tl.tensor:
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def token_bits(
    first: tl.tensor,  # uint32
    second: tl.tensor,  # uint32
    token_ids: tl.tensor,  # int32
) -> tl.tensor:  # uint32
    return mix(mix(first ^ (token_ids.to(tl.uint32) * STEP)) + second)


@triton.jit
def uniform(
    bits: tl.tensor,  # uint32
) -> tl.tensor:  # float64, in the open interval (0, 1)
    return ((bits >> 8).to(tl.float64) + 0.5) * UNIT


@triton.jit
def gumbel(
    bits: tl.tensor,  # uint32
) -> tl.tensor:  # float64
    return -tl.log(-tl.log(uniform(bits)))


@triton.jit
def near_gumbel(
    bits: tl.tensor,  # uint32
) -> tl.tensor:  # float32, within ERROR of the exact one
    """Near one a series of what u lacks of it, which float32 has exactly there, stands for the logarithm: of that
    targets promise an absolute error only."""
    number = (bits >> 8).to(tl.int32)
    rest = ((0xFFFFFF - number).to(tl.float32) + 0.5) * UNIT
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    chance = (number.to(tl.float32) + 0.5) * UNIT
    exponential = tl.where(rest < 0.015625, series, -tl.log(tl.minimum(chance, 0.99)))
    return -tl.log(exponential)


ERROR = tl.constexpr(1e-3)  # of that, and of a difference of values in float32; amply
