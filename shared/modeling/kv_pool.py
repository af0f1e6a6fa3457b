"""The physical KV pool.  It owns the memory of all blocks and knows nothing of who holds which."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


class KVPool:
    """Per layer one tensor of keys and one of values, zero at first so that no stale bit is ever a NaN."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor]] = [  # (keys, values), each of `shape`
            (zeros(shape, dtype, device), zeros(shape, dtype, device)) for _ in range(num_layers)
        ]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in every layer; all sources are read before any destination is written."""
        if not copies:
            return
        sources, destinations = torch.tensor(copies, device=self.layers[0][0].device).unbind(1)
        for layer in self.layers:
            for cache in layer:
                cache[destinations] = cache[sources]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost nothing until they are written: fresh pages are zero, and filling a GiB takes a second."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def bytes_per_block(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
