"""A mixture of experts: a product for each projection, over tiles of slots that share an expert, and a sum over ranks.

What a slot is stands in `kernels.triton.experts.expert_slots`.  Products are stored by slot, so that the sum needs no
sorting, and goes in the order of rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.experts.experts import ExpertWeights
from kernels.ops.linears.quantise import quantise
from kernels.triton.experts.expert_slots import find_tile, most_tiles, sort_slots
from kernels.triton.experts.experts_decoded import multiply_decoded_experts
from kernels.triton.launch import MIN_DOT, dot_type, num_warps, power_of_2
from kernels.triton.layers.activation import activation, gated_activation
from kernels.triton.linears.linear_int8 import Tile, quantise_rows

LONGEST = 2048  # elements that one program sums


def pack_experts(
    weights: Sequence[Tensor],  # [count] of [out_features, in_features]
    bias: Tensor | None,  # [count, out_features]
) -> ExpertWeights:
    return ExpertWeights(bias=bias, stacked=torch.stack(list(weights)))


def pack_experts_int8(
    weights: Sequence[Tensor],  # [count] of [out_features, in_features]
    bias: Tensor | None,  # [count, out_features]
) -> ExpertWeights:
    quantised, scales = zip(*map(quantise, weights), strict=True)
    return ExpertWeights(bias=bias, stacked=torch.stack(quantised), scales=torch.stack(scales))


def experts(
    x: Tensor,  # [num_tokens, hidden_size]
    ids: Tensor,  # [num_tokens, top_k] int64
    weights: Tensor,  # [num_tokens, top_k] float32
    gate_up: ExpertWeights,  # [count, 2 * inner_size, hidden_size] where gated, else [count, inner_size, hidden_size]
    down: ExpertWeights,  # [count, hidden_size, inner_size]
    kind: str,  # of activation
    gated: bool,
) -> Tensor:  # [num_tokens, hidden_size]
    ids, weights = ids.contiguous(), weights.contiguous()
    top_k = ids.shape[1]
    slots = sort_slots(ids, gate_up.count)
    inner = _project(x, slots, gate_up, top_k)
    inner = gated_activation(inner, kind) if gated else activation(inner, kind)
    found = _project(inner, slots, down, 1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[1]
    block = min(LONGEST, power_of_2(size))
    sum_ranks[(len(x), triton.cdiv(size, block))](
        found, weights, out, size, TOP_K=top_k, BLOCK=block, num_warps=num_warps(block), enable_fp_fusion=False
    )
    return out


def _project(
    x: Tensor,  # [num_slots / shared, in_features]
    slots: tuple[Tensor, Tensor],  # from `sort_slots`
    packed: ExpertWeights,  # [count, out_features, in_features]
    shared: int,  # slots in succession that have one row of x
) -> Tensor:  # [num_slots, out_features]
    if packed.decoded is not None:
        return multiply_decoded_experts(x, slots, packed.decoded, packed.bias, shared)
    order, ends = slots
    weight = packed.stacked
    assert weight is not None
    count, out_features, depth = weight.shape
    out = torch.empty(len(order), out_features, dtype=x.dtype, device=x.device)
    tile = choose_tile(triton.cdiv(len(order), count), weight.element_size())
    tiles = most_tiles(len(order), count, tile.rows)
    source, scales = (x, ends) if packed.scales is None else quantise_rows(x)
    source = source if source.stride(-1) == 1 else source.contiguous()
    multiply_slots[(tiles * triton.cdiv(out_features, tile.columns),)](
        source, scales, weight, ends if packed.scales is None else packed.scales,
        ends if packed.bias is None else packed.bias, order, ends, out,
        tiles, count, out_features, depth, shared, source.stride(0), weight.stride(0), weight.stride(1),
        SCALED=packed.scales is not None, BIAS=packed.bias is not None, EXPERTS=power_of_2(count),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        DOT=tl.int8 if packed.scales is not None else dot_type(x.dtype),
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def choose_tile(
    num_rows: int,  # of an expert, if all had as many
    itemsize: int,  # bytes of a weight
) -> Tile:
    """Few rows are bound by the weights' bytes: narrow tiles, so that all multiprocessors read, and deep pipelines."""
    if num_rows <= MIN_DOT:
        return Tile(MIN_DOT, 64, 256 // itemsize, 4, 4)
    if num_rows <= 64:
        return Tile(power_of_2(num_rows), 64, 128 // itemsize, 4, 4)
    return Tile(128, 128, 128 // itemsize, 8, 3)


@triton.jit
def multiply_slots(
    x: tl.tensor,  # [num_slots / shared, depth]
    x_scales: tl.tensor,  # [num_slots / shared] float32; read where SCALED
    weight: tl.tensor,  # [count, out_features, depth]
    weight_scales: tl.tensor,  # [count, out_features] float32, contiguous; read where SCALED
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
    expert_stride: int,
    weight_stride: int,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Tiles of the same weights follow each other, so that a cache has what the next one reads."""
    expert, first, end = find_tile(ends, tl.program_id(0) % num_tiles, count, ROWS, EXPERTS)
    if first >= end:
        return
    places = first + tl.arange(0, ROWS)
    real = places < end
    slots = tl.load(order + places, mask=real, other=0)
    rows = slots // shared
    columns = (tl.program_id(0) // num_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < out_features
    deep = tl.arange(0, DEPTH)
    left = x + rows[:, None].to(tl.int64) * x_stride + deep[None, :]
    own = weight + expert.to(tl.int64) * expert_stride
    right = own + columns[None, :].to(tl.int64) * weight_stride + deep[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.int32 if SCALED else tl.float32)
    for start in range(0, depth, DEPTH):
        inside = start + deep < depth
        some = tl.load(left + start, mask=real[:, None] & inside[None, :], other=0).to(DOT)
        others = tl.load(right + start, mask=inside[:, None] & there[None, :], other=0).to(DOT)
        if SCALED:
            total = tl.dot(some, others, total, out_dtype=tl.int32)
        else:
            total = tl.dot(some, others, total, input_precision="ieee")
    result = total.to(tl.float32)
    if SCALED:
        result = result * tl.load(weight_scales + expert * out_features + columns, mask=there, other=0.0)[None, :]
        result = result * tl.load(x_scales + rows, mask=real, other=0.0)[:, None]
    if BIAS:
        added = tl.load(bias + expert * out_features + columns, mask=there, other=0.0)
        result = result + added.to(tl.float32)[None, :]
    targets = out + slots[:, None].to(tl.int64) * out_features + columns[None, :]
    tl.store(targets, result.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


@triton.jit
def sum_ranks(
    found: tl.tensor,  # [num_tokens * TOP_K, size], contiguous
    weights: tl.tensor,  # [num_tokens * TOP_K] float32
    out: tl.tensor,  # [num_tokens, size], contiguous
    size: int,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for rank in range(TOP_K):
        slot = row * TOP_K + rank
        one = tl.load(found + slot * size + columns, mask=inside, other=0.0).to(tl.float32)
        total = total + one * tl.load(weights + slot)
    tl.store(out + row * size + columns, total.to(out.dtype.element_ty), mask=inside)
