"""Keys and values into their slots of the paged cache, in its format: one program per token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.attention.kv_cache import KVCache
from kernels.triton.attention.kv_format import scale_places, scales_of, store_heads
from kernels.triton.launch import num_warps, power_of_2


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor | None,  # [num_tokens, num_kv_heads, head_dim]; None: the cache is latent
    cache: KVCache,  # written
    slot_mapping: Tensor,  # [num_slots] int64; tokens beyond it, or with one below zero, are padding and not stored
) -> None:
    num_kv_heads, head_dim = key.shape[1:]
    key_scales, value_scales, scaled = scales_of(cache)
    heads, width = power_of_2(num_kv_heads), power_of_2(head_dim)
    given = key if value is None else value
    store_tokens[(len(slot_mapping),)](
        key, given, cache.keys, cache.values, key_scales, value_scales, slot_mapping, num_kv_heads,
        *key.stride()[:2], *given.stride()[:2], *cache.keys.stride()[:3], *cache.values.stride()[:3],
        LATENT=value is None, SCALED=scaled, BLOCK_SIZE=cache.block_size, HEADS=heads, HEAD_DIM=head_dim, WIDTH=width,
        num_warps=num_warps(heads * width),
    )  # fmt: skip


@triton.jit
def store_tokens(
    key: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    keys: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: tl.tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slot_mapping: tl.tensor,  # [num_slots] int64
    num_kv_heads: int,
    key_stride: int,
    key_head_stride: int,
    value_stride: int,
    value_head_stride: int,
    keys_block_stride: int,
    keys_slot_stride: int,
    keys_head_stride: int,
    values_block_stride: int,
    values_slot_stride: int,
    values_head_stride: int,
    LATENT: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        heads = tl.arange(0, HEADS)
        columns = tl.arange(0, WIDTH)
        real = heads < num_kv_heads
        held = real[:, None] & (columns < HEAD_DIM)[None, :]
        new = key + token * key_stride + heads[:, None] * key_head_stride + columns[None, :]
        place = keys + block * keys_block_stride + offset * keys_slot_stride
        place = place + heads[:, None] * keys_head_stride + columns[None, :]
        scales = scale_places(key_scales, slot, heads, num_kv_heads, SCALED)
        found = tl.load(new, mask=held, other=0.0).to(tl.float32)
        store_heads(found, tl.max(tl.abs(found), 1), held, place, scales, real, SCALED)
        if not LATENT:
            new = value + token * value_stride + heads[:, None] * value_head_stride + columns[None, :]
            place = values + block * values_block_stride + offset * values_slot_stride
            place = place + heads[:, None] * values_head_stride + columns[None, :]
            scales = scale_places(value_scales, slot, heads, num_kv_heads, SCALED)
            found = tl.load(new, mask=held, other=0.0).to(tl.float32)
            store_heads(found, tl.max(tl.abs(found), 1), held, place, scales, real, SCALED)
