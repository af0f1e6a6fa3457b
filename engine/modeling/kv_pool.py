"""The physical KV pool.  It owns the memory of all blocks and knows nothing of who holds which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np
import torch
from torch import Tensor

from engine.description.spec import AttentionSpec, LatentSpec
from engine.weights.kv_scales import KVScales
from engine.weights.pages import Arena, padded
from kernels.ops.attention.kv_cache import FP8S, KVCache
from kernels.ops.steps.transfer import to_device

Sliding = Sequence[tuple[int, int]]  # windows, and the numbers of blocks of their pools
TakeBytes = Callable[[int], Tensor]  # size -> [size] uint8 zeros


class KVPool:
    """Tensors of whatever layout a model has, with the block as dimension 0.

    Zero at first, so that no stale bit is ever a NaN.
    """

    is_part = False  # a block has more bytes elsewhere, at the other ranks of a group

    def __init__(
        self, num_blocks: int, block_size: int, tensors: Iterable[Tensor], sliding: Sequence[KVPool] = ()
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self.tensors: tuple[Tensor, ...] = tuple(tensors)  # each [num_blocks, ...]
        self.sliding = tuple(sliding)  # of the layers that see a window

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in every layer; all sources are read before any destination is written.
        Those of the layers of `sliding` are other blocks."""
        if not copies or not self.tensors:
            return
        sources, destinations = to_device(np.array(copies), self.tensors[0].device).unbind(1)
        for tensor in self.tensors:
            held = tensor.view(torch.uint8) if tensor.dtype in FP8S else tensor
            held[destinations] = held[sources]


@dataclass(frozen=True, slots=True)
class LayerPools:
    """Which pool each layer's keys and values are in: that of its window, where there is one, or else the first."""

    pools: tuple[int, ...]  # of each layer: 0, or from 1 on a sliding one
    sizes: tuple[int, ...]  # blocks of each pool

    @classmethod
    def of(cls, windows: Iterable[int], num_blocks: int, sliding: Sliding) -> LayerPools:
        """For the windows of a model's layers."""
        places = {window: place for place, (window, _) in enumerate(sliding, 1)}
        pools = tuple(places.get(window, 0) for window in windows)
        return cls(pools, (num_blocks, *(size for _, size in sliding)))

    @property
    def num_blocks(self) -> list[int]:
        """Of each layer."""
        return [self.sizes[pool] for pool in self.pools]

    def make(self, block_size: int, tensors: Sequence[Iterable[Tensor]]) -> KVPool:
        """Of each layer's tensors."""
        by_pool: list[list[Tensor]] = [[] for _ in self.sizes]
        for pool, of_layer in zip(self.pools, tensors, strict=True):
            by_pool[pool] += of_layer
        first, *sliding = zip(self.sizes, by_pool, strict=True)
        return KVPool(first[0], block_size, first[1], [KVPool(size, block_size, held) for size, held in sliding])


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout that torch kernels read, `kernels.ops.attention.kv_cache`."""

    layers: tuple[AttentionSpec, ...]
    dtype: torch.dtype  # int8 has float32 scales beside it; fp8 has one of each head
    device: torch.device
    scales: tuple[KVScales, ...] = ()  # of each layer's heads in fp8; empty: all are one

    def layer_bytes(self, block_size: int) -> list[int]:
        """Of a block, in each layer."""
        scale = torch.float32.itemsize if self.dtype == torch.int8 else 0
        vectors = ((one.cached_vectors, one.head_dim * self.dtype.itemsize + scale) for one in self.layers)
        return [block_size * count * size for count, size in vectors]

    def make_caches(self, num_blocks: Sequence[int], block_size: int) -> list[KVCache]:
        """With so many blocks in each layer."""
        take = self._memory(sum(map(mul, self.layer_bytes(block_size), num_blocks)))
        return [self._make_cache(index, count, block_size, take) for index, count in enumerate(num_blocks)]

    def _make_cache(self, layer: int, num_blocks: int, block_size: int, take: TakeBytes) -> KVCache:
        heads = self.layers[layer]
        shape = (num_blocks, block_size, heads.num_kv_heads)

        def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

        if heads.latent is not None:
            return self._latent_cache(layer, tensor((*shape, heads.head_dim), self.dtype), heads.latent, tensor)
        keys, values = (tensor((*shape, heads.head_dim), self.dtype) for _ in range(2))
        if self.dtype in FP8S:
            scales = self.scales[layer] if self.scales else self._ones(heads.num_kv_heads)
            return KVCache(keys, values, key_head_scales=scales.keys, value_head_scales=scales.values)
        if self.dtype != torch.int8:
            return KVCache(keys, values)
        return KVCache(keys, values, tensor(shape, torch.float32), tensor(shape, torch.float32))

    def _latent_cache(
        self, layer: int, keys: Tensor, latent: LatentSpec, tensor: Callable[[tuple[int, ...], torch.dtype], Tensor]
    ) -> KVCache:
        values = keys[..., : latent.rank]
        if self.dtype in FP8S:
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
