"""Writes this step's keys and values into their slots of the paged cache."""

from __future__ import annotations

from torch import Tensor


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written
    slot_mapping: Tensor,  # [num_slots] int64; tokens beyond it are padding and are not stored
) -> None:
    num_slots = slot_mapping.shape[0]
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key[:num_slots])
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value[:num_slots])
