"""The layout of a KV pool that native code reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.description.spec import AttentionSpec, ModelSpec
from engine.weights.formats import Formats
from engine.weights.pages import Arena, padded
from kernels.cpu.binding.native import KVShape, Native


@dataclass(frozen=True, slots=True)
class NativeLayout:
    """The KV pool's layout: opaque blocks of bytes, of keys and of values; latents are values alone."""

    native: Native
    layers: tuple[AttentionSpec, ...]
    dtype: torch.dtype

    def layer_bytes(self, block_size: int) -> list[int]:
        """Of a block, in each layer."""
        return [sum(self._sizes(heads, block_size)) for heads in self.layers]

    def make_blocks(self, num_blocks: Sequence[int], block_size: int) -> list[tuple[Tensor, Tensor]]:
        """Of each layer, keys and values [num_blocks, bytes] uint8, with so many blocks."""
        sizes = [self._sizes(heads, block_size) for heads in self.layers]
        columns = list(zip(num_blocks, sizes, strict=True))
        arena = Arena(sum(padded(count * size) for count, both in columns for size in both))
        made = [[arena.take(count * size).view(count, size) for size in both] for count, both in columns]
        return [(keys, values) for keys, values in made]

    def _sizes(self, heads: AttentionSpec, block_size: int) -> tuple[int, int]:
        shape = KVShape(self.dtype, block_size, heads.num_kv_heads, heads.head_dim)
        return 0 if heads.latent else self.native.key_bytes(shape), self.native.value_bytes(shape)


def native_layout(spec: ModelSpec, native: Native, formats: Formats) -> NativeLayout:
    return NativeLayout(native, spec.attentions, formats.kv)
