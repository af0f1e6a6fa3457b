"""Norm, rotation and KV store in one pass: a program per token and KV head, with the query heads that share it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.attention.kv_cache import KVCache
from kernels.ops.attention.rotary_store import HeadNorm
from kernels.triton.attention.kv_format import scale_places, scales_of, store_heads
from kernels.triton.attention.rotary import load_halves, turn
from kernels.triton.launch import num_warps, power_of_2, wait_for_others, when


def rotary_store(
    qkv: Tensor,  # [num_tokens, num_heads + 2 num_kv_heads, head_dim]: queries, keys, values
    cos: Tensor,  # [num_tokens, 1, head_dim], the two halves alike
    sin: Tensor,  # [num_tokens, 1, head_dim], the first half negated
    norm: HeadNorm | None,
    cache: KVCache,  # written
    slot_mapping: Tensor,  # [num_slots] int64
    *,
    early: bool = False,  # as `launch.when` has it
) -> Tensor:  # [num_tokens, num_heads, head_dim]: the queries
    num_tokens, _, head_dim = qkv.shape
    num_kv_heads = cache.keys.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    key_scales, value_scales, scaled = scales_of(cache)
    group, half = power_of_2(num_heads // num_kv_heads), power_of_2(head_dim // 2)
    turn_and_store[(num_tokens, num_kv_heads)](
        qkv, cos, sin, qkv if norm is None else norm.query, qkv if norm is None else norm.key, query,
        cache.keys, cache.values, key_scales, value_scales, slot_mapping, len(slot_mapping),
        0.0 if norm is None else norm.eps, num_heads, qkv.stride(0), qkv.stride(1), cos.stride(0),
        *cache.keys.stride()[:3], *cache.values.stride()[:3],
        NORM=norm is not None, SCALED=scaled, BLOCK_SIZE=cache.block_size, SHARE=num_heads // num_kv_heads,
        GROUP=group, HEAD_DIM=head_dim, HALF=half, num_warps=num_warps(group * half), **when(early, qkv),
    )  # fmt: skip
    return query


@triton.jit
def turn_and_store(
    qkv: tl.tensor,  # [num_tokens, num_heads + 2 num_kv_heads, head_dim]
    cos: tl.tensor,  # [num_tokens, head_dim]
    sin: tl.tensor,  # [num_tokens, head_dim]
    query_norm: tl.tensor,  # [head_dim]; read where NORM
    key_norm: tl.tensor,  # [head_dim]; read where NORM
    query: tl.tensor,  # [num_tokens, num_heads, head_dim], contiguous
    keys: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slot_mapping: tl.tensor,  # [num_slots] int64
    num_slots: int,
    eps: float,
    num_heads: int,
    stride: int,
    head_stride: int,
    angle_stride: int,
    keys_block_stride: int,
    keys_slot_stride: int,
    keys_head_stride: int,
    values_block_stride: int,
    values_slot_stride: int,
    values_head_stride: int,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SHARE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_for_others(EARLY)
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    angles = token * angle_stride + tl.arange(0, HALF)
    columns = tl.arange(0, HALF)[None, :]
    real = columns < HEAD_DIM // 2

    shared = tl.arange(0, GROUP)[:, None]
    held = (shared < SHARE) & real
    heads = kv_head * SHARE + shared
    first, second = load_halves(qkv + token * stride + heads * head_stride + columns, held, HEAD_DIM)
    if NORM:
        first, second = norm_halves(first, second, query_norm, eps, query, HEAD_DIM, HALF)
    first, second = turn(first, second, cos + angles, sin + angles, HEAD_DIM, HALF)
    place = query + (token * num_heads + heads) * HEAD_DIM + columns
    tl.store(place, first.to(query.dtype.element_ty), mask=held)
    tl.store(place + HEAD_DIM // 2, second.to(query.dtype.element_ty), mask=held)

    if token < num_slots:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            source = qkv + token * stride + (num_heads + kv_head) * head_stride + columns
            low, high = load_halves(source, real, HEAD_DIM)
            if NORM:
                low, high = norm_halves(low, high, key_norm, eps, query, HEAD_DIM, HALF)
            low, high = turn(low, high, cos + angles, sin + angles, HEAD_DIM, HALF)
            slot_place = keys + block * keys_block_stride + offset * keys_slot_stride
            slot_place = slot_place + kv_head * keys_head_stride + columns
            scale = scale_places(key_scales + kv_head, slot, tl.arange(0, 1), num_kv_heads, SCALED)
            store_halves(round_as(low, query), round_as(high, query), real, slot_place, scale, SCALED, HEAD_DIM)
            value_low, value_high = load_halves(source + num_kv_heads * head_stride, real, HEAD_DIM)
            target = values + block * values_block_stride + offset * values_slot_stride
            target = target + kv_head * values_head_stride + columns
            value_scale = scale_places(value_scales + kv_head, slot, tl.arange(0, 1), num_kv_heads, SCALED)
            store_halves(value_low, value_high, real, target, value_scale, SCALED, HEAD_DIM)


@triton.jit
def norm_halves(
    first: tl.tensor,  # [HEADS, HALF] float32
    second: tl.tensor,  # [HEADS, HALF] float32
    weight: tl.tensor,  # [head_dim]
    eps: float,
    like: tl.tensor,  # pointer to the type in which the norm is rounded
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    columns = tl.arange(0, HALF)
    real = columns < HEAD_DIM // 2
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    low = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    high = tl.load(weight + HEAD_DIM // 2 + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    first = round_as(round_as(first * scale, like) * low, like)
    second = round_as(round_as(second * scale, like) * high, like)
    return first, second


@triton.jit
def round_as(
    x: tl.tensor,  # float32
    like: tl.tensor,  # pointer
) -> tl.tensor:  # float32: what the type of `like` holds of it
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def store_halves(
    first: tl.tensor,  # [1, HALF] float32
    second: tl.tensor,  # [1, HALF] float32
    real: tl.tensor,  # [1, HALF] bool
    place: tl.tensor,  # [1, HALF] pointers to the first half
    scales: tl.tensor,  # [1] pointers
    SCALED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """A head's scale is that of both its halves."""
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))  # [1]
    always = largest >= 0.0
    store_heads(first, largest, real, place, scales, always, SCALED)
    store_heads(second, largest, real, place + HEAD_DIM // 2, scales, always, SCALED)
