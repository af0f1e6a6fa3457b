"""The physical KV pool.  It owns the memory of all blocks and knows nothing of who holds which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.description.spec import AttentionSpec, LatentSpec
from engine.weights.kv_scales import KVScales
from engine.weights.pages import Arena, padded
from kernels.ops.kv_cache import FP8, KVCache
from kernels.ops.transfer import to_device

TakeBytes = Callable[[int], Tensor]  # size -> [size] uint8 zeros


class KVPool:
    """Tensors of whatever layout a model has, with the block as dimension 0.

    Zero at first, so that no stale bit is ever a NaN.
    """

    def __init__(self, num_blocks: int, block_size: int, tensors: Iterable[Tensor]) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self.tensors: tuple[Tensor, ...] = tuple(tensors)  # each [num_blocks, ...]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in every layer; all sources are read before any destination is written."""
        if not copies:
            return
        sources, destinations = to_device(np.array(copies), self.tensors[0].device).unbind(1)
        for tensor in self.tensors:
            held = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
            held[destinations] = held[sources]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout that torch kernels read, `kernels.ops.kv_cache`."""

    layers: tuple[AttentionSpec, ...]
    dtype: torch.dtype  # int8 has float32 scales beside it; fp8 has one of each head
    device: torch.device
    scales: tuple[KVScales, ...] = ()  # of each layer's heads in fp8; empty: all are one

    def bytes_per_block(self, block_size: int) -> int:
        scale = torch.float32.itemsize if self.dtype == torch.int8 else 0
        per_token = sum(one.cached_vectors * (one.head_dim * self.dtype.itemsize + scale) for one in self.layers)
        return block_size * per_token

    def make_caches(self, num_blocks: int, block_size: int) -> list[KVCache]:
        take = self._memory(self.bytes_per_block(block_size) * num_blocks)
        return [self._make_cache(index, num_blocks, block_size, take) for index in range(len(self.layers))]

    def _make_cache(self, layer: int, num_blocks: int, block_size: int, take: TakeBytes) -> KVCache:
        heads = self.layers[layer]
        shape = (num_blocks, block_size, heads.num_kv_heads)

        def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

        if heads.latent is not None:
            return self._latent_cache(layer, tensor((*shape, heads.head_dim), self.dtype), heads.latent, tensor)
        keys, values = (tensor((*shape, heads.head_dim), self.dtype) for _ in range(2))
        if self.dtype == FP8:
            scales = self.scales[layer] if self.scales else self._ones(heads.num_kv_heads)
            return KVCache(keys, values, key_head_scales=scales.keys, value_head_scales=scales.values)
        if self.dtype != torch.int8:
            return KVCache(keys, values)
        return KVCache(keys, values, tensor(shape, torch.float32), tensor(shape, torch.float32))

    def _latent_cache(
        self, layer: int, keys: Tensor, latent: LatentSpec, tensor: Callable[[tuple[int, ...], torch.dtype], Tensor]
    ) -> KVCache:
        values = keys[..., : latent.rank]
        if self.dtype == FP8:
            scale = (self.scales[layer] if self.scales else self._ones(1)).keys
            return KVCache(keys, values, key_head_scales=scale, value_head_scales=scale, latent=True)
        scales = tensor(tuple(keys.shape[:3]), torch.float32) if self.dtype == torch.int8 else None
        return KVCache(keys, values, scales, scales, latent=True)

    def _ones(self, count: int) -> KVScales:
        return KVScales(*(torch.ones(count, device=self.device) for _ in range(2)))

    def _memory(self, size: int) -> TakeBytes:
        """On a CPU zeros cost nothing until they are written: filling a GiB would take a second."""
        if self.device.type == "cpu":
            return Arena(size + 4 * len(self.layers) * padded(1)).take
        return lambda size: torch.zeros(size, dtype=torch.uint8, device=self.device)
