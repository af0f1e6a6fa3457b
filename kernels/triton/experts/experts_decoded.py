"""Products of a mixture whose experts are codes of 4 or 8 bits in memory, and numbers of the input's format when
multiplied.

A program has a tile of slots that share an expert (`kernels.triton.experts.expert_slots`), and decodes its expert's
words as `kernels.triton.linears.linear_decoded` does: the weight is the left side of the product.  All input features
are summed by one program, in their order, so that neither the number of a tile's rows nor other rows change a bit of a
row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.linears.decoded_weight import WORD, DecodedWeight
from kernels.triton.experts.expert_slots import find_tile, most_tiles
from kernels.triton.launch import MIN_DOT, dot_type, power_of_2, stages_within
from kernels.triton.linears.linear_codes import NIBBLE, group_at, number_at

COLUMNS, MOST_ROWS = 128, {2: 128, 4: 32}  # of a tile; rows by the bytes of a number: what registers hold


def multiply_decoded_experts(
    x: Tensor,  # [num_slots / shared, in_features]
    slots: tuple[Tensor, Tensor],  # from `sort_slots`
    weight: DecodedWeight,  # [count, out_features, in_features]
    bias: Tensor | None,  # [count, out_features]
    shared: int,  # slots in succession that have one row of x
) -> Tensor:  # [num_slots, out_features]
    order, ends = slots
    count, out_features = len(weight.codes), weight.out_features
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(len(order), out_features, dtype=x.dtype, device=x.device)
    rows = min(MOST_ROWS[x.element_size()], power_of_2(triton.cdiv(len(order), count), at_least=MIN_DOT))
    tiles = most_tiles(len(order), count, rows)
    staged = weight.slab * (4 * COLUMNS + WORD // weight.bits * rows * x.element_size())  # words, and what they meet
    multiply_decoded_slots[(tiles * triton.cdiv(out_features, COLUMNS),)](
        x, weight.codes, weight.scales, weight.zeros, x if bias is None else bias, order, ends, out,
        tiles, count, out_features, weight.in_features, shared, x.stride(0),
        weight.num_blocks, weight.codes.stride(0), weight.scales.stride(0), NIBBLE,
        KIND=weight.kind, BITS=weight.bits, GROUP=weight.group, BIAS=bias is not None, EXPERTS=power_of_2(count),
        ROWS=rows, COLUMNS=COLUMNS, SLAB=weight.slab, DOT=dot_type(x.dtype),
        num_warps=8, num_stages=stages_within(staged, 3 if rows == MIN_DOT else 4),
    )  # fmt: skip
    return out


@triton.jit
def multiply_decoded_slots(
    x: tl.tensor,  # [num_slots / shared, depth]
    codes: tl.tensor,  # [count, blocks x SLAB, out_features], as DecodedWeight has them
    scales: tl.tensor,  # [count, num_groups, out_features], contiguous
    zeros: tl.tensor,  # [count, num_groups, out_features] uint8, contiguous; read of INTEGERS
    bias: tl.tensor,  # [count, out_features], contiguous; read where BIAS
    order: tl.tensor,  # [num_slots] int32
    ends: tl.tensor,  # [count] int32
    out: tl.tensor,  # [num_slots, out_features], contiguous
    num_tiles: int,
    count: int,
    out_features: int,
    depth: int,
    shared: int,
    x_stride: int,
    blocks: int,
    codes_stride: int,  # words of an expert
    scales_stride: int,  # scales of an expert, and zeros
    nibble: int,  # NIBBLE
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLAB: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Tiles of the same weights follow each other, so that a cache has what the next one reads."""
    expert, begin, end = find_tile(ends, tl.program_id(0) % num_tiles, count, ROWS, EXPERTS)
    if begin >= end:
        return
    places = begin + tl.arange(0, ROWS)
    real = places < end
    slots = tl.load(order + places, mask=real, other=0)
    columns = (tl.program_id(0) // num_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < out_features
    few = tl.arange(0, SLAB)
    right = x + (slots // shared)[None, :].to(tl.int64) * x_stride + few[:, None]
    words_of = codes + expert.to(tl.int64) * codes_stride
    scales_of = scales + expert.to(tl.int64) * scales_stride
    zeros_of = zeros + expert.to(tl.int64) * scales_stride
    DEPTH: tl.constexpr = SLAB * (32 // BITS)
    mask = ((columns >> 31) + nibble)[:, None]  # laid out as the columns are, whose numbers are never negative
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for block in range(blocks):
        at = (block * SLAB + few)[None, :].to(tl.int64) * out_features + columns[:, None]
        words = tl.load(words_of + at, mask=there[:, None], other=0)
        for slab in tl.static_range(32 // BITS):
            first = block * DEPTH + slab * SLAB
            given = tl.load(right + first, mask=real[None, :] & (first + few < depth)[:, None], other=0.0)
            place = (group_at(block, slab, SLAB, 32 // BITS, GROUP) * out_features + columns)[:, None]
            inside = (there & (first + 0 * columns < depth))[:, None]
            number = number_at(words, BITS * slab, mask, scales_of + place, zeros_of + place, inside, KIND)
            number = number.to(x.dtype.element_ty).to(DOT)
            total = tl.dot(number, given.to(DOT), total, input_precision="ieee")
    if BIAS:
        added = tl.load(bias + expert * out_features + columns, mask=there, other=0.0)
        total = total + added.to(tl.float32)[:, None]
    targets = out + slots[None, :].to(tl.int64) * out_features + columns[:, None]
    tl.store(targets, total.to(out.dtype.element_ty), mask=real[None, :] & there[:, None])
