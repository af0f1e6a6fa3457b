"""What codes of weights stand for, as `kernels.ops.linears.decoded_weight` packs them, for kernels that decode."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.linears.decoded_weight import INTEGERS, OCTETS

# The mask of a code of 4 bits.  Kernels are given it: a constant would be moved to a register anew for each code.
NIBBLE = 15
INTEGERS_KIND, OCTETS_KIND = tl.constexpr(INTEGERS), tl.constexpr(OCTETS)


@triton.jit
def number_of(
    code: tl.tensor,  # int32, whose lowest bits are a code
    scales: tl.tensor,  # pointers that broadcast to it
    zeros: tl.tensor,  # pointers; read of INTEGERS
    inside: tl.tensor,  # bool: where there are scales
    KIND: tl.constexpr,
) -> tl.tensor:  # float32
    scale = tl.load(scales, mask=inside, other=0.0).to(tl.float32)
    if KIND == INTEGERS_KIND:
        value = integer_of(code) - tl.load(zeros, mask=inside, other=0).to(tl.float32)
    elif KIND == OCTETS_KIND:
        value = e4m3_of(code)
    else:
        value = e2m1_of(code)
    return value * scale


@triton.jit
def group_at(
    block: tl.tensor,  # of codes
    SLAB: tl.constexpr,  # of the block
    DEPTH: tl.constexpr,  # input features of a slab
    SLABS: tl.constexpr,  # of a block
    GROUP: tl.constexpr,  # input features
) -> tl.tensor:  # number of the group whose scale a slab has
    """In terms by which a compiler sees which slabs of a block share theirs, and reads it once."""
    if SLABS * DEPTH % GROUP == 0:
        return block * (SLABS * DEPTH // GROUP) + SLAB * DEPTH // GROUP
    if GROUP % (SLABS * DEPTH) == 0:
        return block // (GROUP // (SLABS * DEPTH))
    return (block * SLABS + SLAB) * DEPTH // GROUP


@triton.jit
def number_at(
    words: tl.tensor,  # int32
    PLACE: tl.constexpr,  # of a code's lowest bit
    mask: tl.tensor,  # int32: of INTEGERS, the lowest 4 bits
    scales: tl.tensor,  # pointers that broadcast to it
    zeros: tl.tensor,  # pointers; read of INTEGERS
    inside: tl.tensor,  # bool: where there are scales
    KIND: tl.constexpr,
) -> tl.tensor:  # float32, the bits of `number_of`
    """As `number_of`, with fewer operations for integers, which a program of few rows is bound by."""
    if KIND != INTEGERS_KIND:
        return number_of(words >> PLACE, scales, zeros, inside, KIND)
    scale = tl.load(scales, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(zeros, mask=inside, other=0).to(tl.float32)
    # A code stays where it is in the mantissa of a float whose last bit there counts one; the upper codes come down
    # together first.  Both numbers are integers that float32 has, and so is their difference.
    if PLACE > 16:
        value = _above(words >> 12, PLACE - 12, mask, zero)
    else:
        value = _above(words, PLACE, mask, zero)
    return value * scale


@triton.jit
def _above(
    words: tl.tensor,  # int32
    PLACE: tl.constexpr,  # of a code's lowest bit, up to 16
    mask: tl.tensor,  # int32: the lowest 4 bits
    zero: tl.tensor,  # float32
) -> tl.tensor:  # float32: code - zero
    bits = (words & (mask << PLACE)) | ((150 - PLACE) << 23)
    return bits.to(tl.float32, bitcast=True) - (zero + (1 << (23 - PLACE)))


# A conversion of an integer costs several times what a logical operation does: numbers are made from their bits.


@triton.jit
def integer_of(
    code: tl.tensor,  # int32: 4 bits
) -> tl.tensor:  # float32
    return ((code & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def e2m1_of(
    code: tl.tensor,  # int32: a sign, two bits of exponent, one of mantissa
) -> tl.tensor:  # float32
    bits = ((code & 7) << 22) | ((code & 8) << 28)  # float32's exponents are biased by 127, these by 1
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e4m3_of(
    code: tl.tensor,  # int32: a sign, four bits of exponent, three of mantissa
) -> tl.tensor:  # float32
    size = code & 127
    bits = (size << 20) | ((code & 128) << 24)  # biased by 7
    return tl.where(size == 127, float("nan"), bits.to(tl.float32, bitcast=True) * 1.329227995784916e36)
