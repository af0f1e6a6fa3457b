"""Linear layers whose weights are codes of 4 or 8 bits in memory, and numbers of the input's format when multiplied.

A program reads words of codes once, through shared memory, turns them into numbers in registers, and the matrix units
take them from there: the weight is the left side of the product, so that few rows make a narrow right side.  Few rows
are bound by the codes' bytes, so the input features are cut into parts, as many as a weight's shape alone says, each
for programs of its own; their sums are added in order by a second launch.  More rows go through the parts one after
the other, and for many the weight is decoded apart (`linear_wide`).  How many rows a tile has changes no bit: a row's
sums go along the input features in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.linears.decoded_weight import LONG, WORD, DecodedWeight
from kernels.ops.linears.linear import LinearWeight
from kernels.triton.launch import MIN_DOT, dot_type, power_of_2, stages_within
from kernels.triton.linears.linear_codes import NIBBLE, group_at, number_at
from kernels.triton.linears.linear_wide import linear_wide

COLUMNS, MOST_ROWS = 128, {2: 64, 4: 32}  # of a tile; rows by the bytes of a number: what registers hold
PROGRAMS = 264  # two for each multiprocessor of an H100
FEW_ROWS = 64  # whose parts are summed apart
MANY_ROWS = 128  # beyond them the weight's numbers are made in memory first


def num_parts(weight: DecodedWeight) -> int:
    """How many the input features are cut into."""
    return max(1, min(PROGRAMS // -(-weight.out_features // COLUMNS), weight.num_blocks))


def linear_decoded(
    x: Tensor,  # [num_tokens, in_features]
    packed: LinearWeight,  # [out_features, in_features], decoded
    bias: Tensor | None = None,  # [out_features]
) -> Tensor:  # [num_tokens, out_features]
    weight = packed.decoded
    assert weight is not None
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, parts = len(x), num_parts(weight)
    if num_rows > MANY_ROWS and x.element_size() == 2:
        return linear_wide(x, weight, bias, parts)
    apart = parts > 1 and num_rows <= FEW_ROWS
    out = torch.empty(num_rows, weight.out_features, dtype=x.dtype, device=x.device)
    sums = out.new_empty((parts, num_rows, weight.out_features), dtype=torch.float32) if apart else out
    rows = min(MOST_ROWS[x.element_size()], power_of_2(num_rows, at_least=MIN_DOT))
    tiles = triton.cdiv(num_rows, rows) * triton.cdiv(weight.out_features, COLUMNS)
    added = bias is not None and not apart
    slabs = WORD // weight.bits  # of a block
    staged = weight.slab * (4 * COLUMNS + slabs * rows * x.element_size())  # words, and what they meet
    multiply_decoded[(tiles, parts if apart else 1)](
        x, weight.codes, weight.scales, weight.zeros, bias if added else x, sums,
        num_rows, weight.out_features, weight.in_features, x.stride(0),
        triton.cdiv(weight.num_blocks, parts), weight.num_blocks, NIBBLE,
        KIND=weight.kind, BITS=weight.bits, GROUP=weight.group, PARTS=1 if apart else parts, BIAS=added,
        WHOLE=weight.in_features % (slabs * weight.slab) == 0,
        ROWS=rows, COLUMNS=COLUMNS, SLAB=weight.slab, DOT=dot_type(x.dtype),
        num_warps=8, num_stages=stages_within(staged, 2 if weight.slab == LONG else 3 if rows == MIN_DOT else 4),
    )  # fmt: skip
    if apart:
        block = min(1024, power_of_2(weight.out_features))
        grid = num_rows, triton.cdiv(weight.out_features, block)
        add_parts[grid](
            sums, x if bias is None else bias, out, num_rows, weight.out_features,
            PARTS=parts, BIAS=bias is not None, BLOCK=block,
        )  # fmt: skip
    return out


@triton.jit
def multiply_decoded(
    x: tl.tensor,  # [num_rows, depth]
    codes: tl.tensor,  # as DecodedWeight has them
    scales: tl.tensor,  # [num_groups, out_features] float32
    zeros: tl.tensor,  # [num_groups, out_features] uint8; read of INTEGERS
    bias: tl.tensor,  # [out_features]; read where BIAS
    out: tl.tensor,  # [num programs of the second axis, num_rows, out_features], contiguous
    num_rows: int,
    out_features: int,
    depth: int,
    x_stride: int,
    part_blocks: int,  # blocks of a part
    blocks: int,
    nibble: int,  # NIBBLE
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,  # of one program
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,  # the last block has no padding
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLAB: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Tiles of the same weights follow each other, so that a cache has what the next one reads."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    real, there = rows < num_rows, columns < out_features
    few = tl.arange(0, SLAB)
    right = x + rows[None, :].to(tl.int64) * x_stride + few[:, None]
    DEPTH: tl.constexpr = SLAB * (32 // BITS)
    mask = ((columns >> 31) + nibble)[:, None]  # laid out as the columns are, whose numbers are never negative
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for index in range(PARTS):
        begin = (tl.program_id(1) * PARTS + index) * part_blocks
        part = tl.zeros((COLUMNS, ROWS), tl.float32)
        for block in range(begin, tl.minimum(begin + part_blocks, blocks)):
            at = (block * SLAB + few)[None, :].to(tl.int64) * out_features + columns[:, None]
            words = tl.load(codes + at, mask=there[:, None], other=0)
            for slab in tl.static_range(32 // BITS):
                first = block * DEPTH + slab * SLAB
                inside, deep = there, real[None, :]
                if not WHOLE:
                    inside = there & (first + 0 * columns < depth)
                    deep = deep & (first + few < depth)[:, None]
                given = tl.load(right + first, mask=deep, other=0.0)
                group = group_at(block, slab, SLAB, 32 // BITS, GROUP)
                place = (group * out_features + columns)[:, None]
                number = number_at(words, slab * BITS, mask, scales + place, zeros + place, inside[:, None], KIND)
                number = number.to(x.dtype.element_ty).to(DOT)
                part = tl.dot(number, given.to(DOT), part, input_precision="ieee")
        total = part if PARTS == 1 else total + part
    if BIAS:
        total = total + tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)[:, None]
    place = (tl.program_id(1) * num_rows + rows[None, :]).to(tl.int64) * out_features + columns[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[None, :] & there[:, None])


@triton.jit
def add_parts(
    sums: tl.tensor,  # [PARTS, num_rows, out_features] float32, contiguous
    bias: tl.tensor,  # [out_features]; read where BIAS
    out: tl.tensor,  # [num_rows, out_features], contiguous
    num_rows: int,
    out_features: int,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < out_features
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_rows + tl.program_id(0)).to(tl.int64) * out_features + columns
        total = total + tl.load(sums + place, mask=there, other=0.0)
    if BIAS:
        total = total + tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0).to(tl.int64) * out_features + columns, total.to(out.dtype.element_ty), mask=there)
