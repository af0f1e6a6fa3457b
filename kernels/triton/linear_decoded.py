"""Linear layers whose weights are codes of 4 or 8 bits in memory, and numbers of the input's format when multiplied.

A program reads words of codes once, turns them into numbers in registers, and these go through shared memory to the
matrix units.  Few rows are bound by the codes' bytes, so the input features are cut into parts, as many as a weight's
shape alone says, each for programs of its own; their sums are added in order by a second launch.  Many rows go through
the parts one after the other.  The tile is one for every number of rows, so that a row's bits depend on nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import linear as plain
from kernels.ops.decoded_weight import DEPTH, INTEGERS, OCTETS, DecodedWeight
from kernels.ops.linear import LinearWeight
from kernels.triton.launch import dot_type, power_of_2

ROWS, COLUMNS = 64, 64  # of a tile
PROGRAMS = 264  # two for each multiprocessor of an H100
FEW_ROWS = 64  # whose parts are summed apart
INTEGERS_KIND, OCTETS_KIND = tl.constexpr(INTEGERS), tl.constexpr(OCTETS)


def num_parts(weight: DecodedWeight) -> int:
    """How many the input features are cut into."""
    return max(1, min(PROGRAMS // -(-weight.out_features // COLUMNS), -(-weight.in_features // DEPTH)))


def linear(
    x: Tensor,  # [num_tokens, in_features]
    weight: LinearWeight,  # [out_features, in_features], plain or decoded
    bias: Tensor | None = None,  # [out_features]
) -> Tensor:  # [num_tokens, out_features]
    """Plain ones are the vendor's."""
    return (plain.linear if weight.decoded is None else linear_decoded)(x, weight, bias)


def linear_decoded(
    x: Tensor,  # [num_tokens, in_features]
    packed: LinearWeight,  # [out_features, in_features], decoded
    bias: Tensor | None = None,  # [out_features]
) -> Tensor:  # [num_tokens, out_features]
    weight = packed.decoded
    assert weight is not None
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, parts = len(x), num_parts(weight)
    apart = parts > 1 and num_rows <= FEW_ROWS
    out = torch.empty(num_rows, weight.out_features, dtype=x.dtype, device=x.device)
    sums = out.new_empty((parts, num_rows, weight.out_features), dtype=torch.float32) if apart else out
    tiles = triton.cdiv(num_rows, ROWS) * triton.cdiv(weight.out_features, COLUMNS)
    blocks = triton.cdiv(weight.in_features, DEPTH)
    added = bias is not None and not apart
    multiply_decoded[(tiles, parts if apart else 1)](
        x, weight.codes, weight.scales, weight.zeros, bias if added else x, sums,
        num_rows, weight.out_features, weight.in_features, x.stride(0), triton.cdiv(blocks, parts), blocks,
        KIND=weight.kind, GROUP=weight.group, PARTS=1 if apart else parts, BIAS=added,
        ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, DOT=dot_type(x.dtype), num_warps=4, num_stages=3,
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
    part_blocks: int,  # DEPTHs of a part
    blocks: int,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,  # of one program
    BIAS: tl.constexpr,
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
    left = x + rows[:, None].to(tl.int64) * x_stride
    SLAB: tl.constexpr = DEPTH // 8
    few = tl.arange(0, SLAB)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for index in tl.static_range(PARTS):
        begin = (tl.program_id(1) * PARTS + index) * part_blocks
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        for block in range(begin, tl.minimum(begin + part_blocks, blocks)):
            if KIND != OCTETS_KIND:
                at = (block * SLAB + few)[:, None].to(tl.int64) * out_features + columns[None, :]
                words = tl.load(codes + at, mask=there[None, :], other=0)
                for slab in tl.static_range(8):
                    first = block * DEPTH + slab * SLAB
                    deep = first + few
                    given = tl.load(left + deep[None, :], mask=real[:, None] & (deep < depth)[None, :], other=0.0)
                    place = (first // GROUP) * out_features + columns
                    inside = there & (first + 0 * columns < depth)
                    scale = tl.load(scales + place, mask=inside, other=0.0)
                    code = (words >> (4 * slab)) & 15
                    if KIND == INTEGERS_KIND:
                        zero = tl.load(zeros + place, mask=inside, other=0).to(tl.float32)
                        value = code.to(tl.float32) - zero[None, :]
                    else:
                        exponent, half = (code >> 1) & 3, code & 1
                        size = tl.where(exponent == 0, 2 * half, (2 + half) << exponent).to(tl.float32) * 0.25
                        value = tl.where(code > 7, -size, size)
                    number = (value * scale[None, :]).to(x.dtype.element_ty).to(DOT)
                    part = tl.dot(given.to(DOT), number, part, input_precision="ieee")
            else:
                for half in tl.static_range(2):
                    deep = block * DEPTH + half * (DEPTH // 2) + tl.arange(0, DEPTH // 2)
                    given = tl.load(left + deep[None, :], mask=real[:, None] & (deep < depth)[None, :], other=0.0)
                    mask = (deep < depth)[:, None] & there[None, :]
                    at = columns[None, :].to(tl.int64) * depth + deep[:, None]
                    value = tl.load(codes + at, mask=mask, other=0.0).to(tl.float32)
                    places = (deep // GROUP)[:, None] * out_features + columns[None, :]
                    scale = tl.load(scales + places, mask=mask, other=0.0)
                    number = (value * scale).to(x.dtype.element_ty).to(DOT)
                    part = tl.dot(given.to(DOT), number, part, input_precision="ieee")
        total = part if PARTS == 1 else total + part
    if BIAS:
        total = total + tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)[None, :]
    place = (tl.program_id(1) * num_rows + rows[:, None]).to(tl.int64) * out_features + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


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
