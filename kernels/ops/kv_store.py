"""Writes this step's keys and values into their slots of the paged cache, rounded to its format."""

from __future__ import annotations

from torch import Tensor

from kernels.ops.kv_cache import KVCache
from kernels.ops.quantise import quantise


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    cache: KVCache,  # written
    slot_mapping: Tensor,  # [num_slots] int64; tokens beyond it are padding and are not stored
) -> None:
    num_slots = slot_mapping.shape[0]
    _store(key[:num_slots], cache.keys, cache.key_scales, slot_mapping)
    _store(value[:num_slots], cache.values, cache.value_scales, slot_mapping)


def _store(
    new: Tensor,  # [num_slots, num_kv_heads, head_dim]
    cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    scales: Tensor | None,  # [num_blocks, block_size, num_kv_heads]
    slots: Tensor,  # [num_slots] int64
) -> None:
    if scales is not None:
        new, scale = quantise(new)
        scales.flatten(0, 1).index_copy_(0, slots, scale)
    cache.flatten(0, 1).index_copy_(0, slots, new.to(cache.dtype))
