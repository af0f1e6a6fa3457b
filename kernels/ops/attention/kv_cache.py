"""One layer's part of the paged KV cache: what it holds, and how a block of it is read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.ops.linears.quantise import dequantise

FP8, FP8_WIDE = torch.float8_e4m3fn, torch.float8_e5m2
FP8S = (FP8, FP8_WIDE)


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys (after rotation) and values by block.

    In int8 each token and KV head has a scale of its own; in fp8 each KV head has one, the same for all tokens.
    Where the cache is latent, values are the first features of the keys, in the same memory and with the same scales.
    """

    keys: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim, or the latent's rank]
    key_scales: Tensor | None = None  # [num_blocks, block_size, num_kv_heads] float32, of int8 keys
    value_scales: Tensor | None = None  # [num_blocks, block_size, num_kv_heads] float32, of int8 values
    key_head_scales: Tensor | None = None  # [num_kv_heads] float32, of fp8 keys
    value_head_scales: Tensor | None = None  # [num_kv_heads] float32, of fp8 values
    latent: bool = field(default=False, kw_only=True)

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that changes: dimension 0 of each is the block."""
        both = (self.keys, self.key_scales), (self.values, self.value_scales)
        return tuple(one for each in both[: 1 if self.latent else 2] for one in each if one is not None)

    def read_keys(
        self,
        blocks: Tensor,  # [n] int64
    ) -> Tensor:  # [n, block_size, num_kv_heads, head_dim]; float32 where the cache is int8 or fp8
        return _read(self.keys, self.key_scales, self.key_head_scales, blocks)

    def read_values(
        self,
        blocks: Tensor,  # [n] int64
    ) -> Tensor:  # [n, block_size, num_kv_heads, head_dim]; float32 where the cache is int8 or fp8
        return _read(self.values, self.value_scales, self.value_head_scales, blocks)


def _read(
    cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    scales: Tensor | None,  # [num_blocks, block_size, num_kv_heads]
    head_scales: Tensor | None,  # [num_kv_heads]
    blocks: Tensor,  # [n] int64
) -> Tensor:  # [n, block_size, num_kv_heads, head_dim]
    if head_scales is not None:  # torch copies bytes of any kind, but numbers of eight bits only as such
        found = cache.view(torch.uint8).index_select(0, blocks).view(cache.dtype)
        return dequantise(found, head_scales)
    found = cache.index_select(0, blocks)
    return found if scales is None else dequantise(found, scales.index_select(0, blocks))
