"""Writes this step's keys and values into their slots of the paged cache, rounded to its format."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.attention.kv_cache import KVCache
from kernels.ops.linears.quantise import quantise, saturate_fp8


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor | None,  # [num_tokens, num_kv_heads, head_dim]; None: the cache is latent
    cache: KVCache,  # written
    slot_mapping: Tensor,  # [num_slots] int64; tokens beyond it, or with one below zero, are padding and not stored
) -> None:
    real = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[real]
    _store(key[real], cache.keys, cache.key_scales, cache.key_head_scales, slots)
    if value is not None:
        _store(value[real], cache.values, cache.value_scales, cache.value_head_scales, slots)


def _store(
    new: Tensor,  # [num_slots, num_kv_heads, head_dim]
    cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    scales: Tensor | None,  # [num_blocks, block_size, num_kv_heads]
    head_scales: Tensor | None,  # [num_kv_heads]
    slots: Tensor,  # [num_slots] int64
) -> None:
    if head_scales is not None:
        rounded = saturate_fp8(new, head_scales, cache.dtype).view(torch.uint8)
        cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, rounded)
        return
    if scales is not None:
        new, scale = quantise(new)
        scales.flatten(0, 1).index_copy_(0, slots, scale)
    cache.flatten(0, 1).index_copy_(0, slots, new.to(cache.dtype))
