"""What lies between the projection of queries, keys and values and attention, as one op.

Queries and keys are normed where the model does that, and rotated; keys and values go to their slots of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops.attention.kv_cache import KVCache
from kernels.ops.attention.kv_store import store_kv
from kernels.ops.attention.rotary import rotary
from kernels.ops.layers.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Of each head by itself, before the rotation."""

    query: Tensor  # [head_dim]
    key: Tensor  # [head_dim]
    eps: float


def rotary_store(
    qkv: Tensor,  # [num_tokens, num_heads + 2 num_kv_heads, head_dim]: queries, keys, values
    cos: Tensor,  # [num_tokens, 1, head_dim], as `kernels.ops.attention.rotary` has them
    sin: Tensor,  # [num_tokens, 1, head_dim]
    norm: HeadNorm | None,
    cache: KVCache,  # written
    slot_mapping: Tensor,  # [num_slots] int64, as `kernels.ops.attention.kv_store` has it
    *,
    normalise: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
) -> Tensor:  # [num_tokens, num_heads, head_dim]: the queries
    num_kv_heads = cache.keys.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    turned, value = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    if norm is not None:
        query = normalise(turned[:, :num_heads], norm.query, norm.eps)
        key = normalise(turned[:, num_heads:], norm.key, norm.eps)
        turned = torch.cat((query, key), dim=1)
    turned = rotary(turned, cos, sin)
    store_kv(turned[:, num_heads:], value, cache, slot_mapping)
    return turned[:, :num_heads]
