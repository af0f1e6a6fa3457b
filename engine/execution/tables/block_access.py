"""Whole blocks of a pool as bytes, read and written between steps, where the block fence agrees.

Only the step thread calls this.  So a block is read after the plans that filled it and before any that gives it to
another row, and what is written to a block lies there before any plan that reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine.execution.tables.block_fence import PoolFence
from engine.modeling.kv_pool import KVPool
from kernels.cpu.binding.loading import checked_copy
from shared.data_link.frames import SPACE_BYTES
from shared.messages.fingerprint import TEXT_PARTS, Fingerprint

Bytes = npt.NDArray[np.uint8]


class BlockAccess:
    """The blocks of a worker's only pool, on a CPU.  A block's bytes are those of all tensors, one after the other.

    `copy`: how bytes on their way to them are copied and checked; None: there is no better way than the usual.
    """

    def __init__(self, pool: KVPool, fence: PoolFence, fingerprint: Fingerprint) -> None:
        self._fence = fence
        self._views = [_as_bytes(tensor) for tensor in pool.tensors]
        self.block_bytes = sum(view.shape[1] for view in self._views)
        self.space = space_of(pool, fingerprint)
        self.copy = checked_copy()

    def read(self, blocks: Sequence[int], generations: Sequence[int]) -> Bytes:  # [number that agree, block_bytes]
        """The first of these blocks, up to one that is in another generation.  Another thread than that of steps may
        read too: what a plan has changed meanwhile is left out."""
        count = self._fence.num_agreeing(blocks, generations)
        found = np.empty((count, self.block_bytes), np.uint8)
        start = 0
        for view in self._views:
            found[:, start : start + view.shape[1]] = view[blocks[:count]]
            start += view.shape[1]
        return found[: self._fence.num_agreeing(blocks[:count], generations[:count])]

    @property
    def life(self) -> int:
        """Differs whenever the pool was emptied, after which generations begin anew."""
        return self._fence.num_resets

    def num_agreeing(self, blocks: Sequence[int], generations: Sequence[int]) -> int:
        """How many of these, the first ones, are in these generations still."""
        return self._fence.num_agreeing(blocks, generations)

    def claim(self, blocks: Sequence[int], generations: Sequence[int]) -> int:
        """Begin these generations, in which blocks are written; how many, the first ones, were newer than known."""
        return self._fence.claim(blocks, generations)

    def write(
        self,
        blocks: Sequence[int],
        generations: Sequence[int],
        data: Bytes,  # [number of blocks, block_bytes]
    ) -> int:
        """Write the first of these blocks, up to one that was given to a row since; returns how many."""
        count = self._fence.num_agreeing(blocks, generations)
        start = 0
        for view in self._views:
            view[blocks[:count]] = data[:count, start : start + view.shape[1]]
            start += view.shape[1]
        return count


def access_to(pool: KVPool, fence: PoolFence, fingerprint: Fingerprint | None) -> BlockAccess | None:
    """None where blocks are not all of a prefix: windows have pools of their own; or where they are on a device,
    or in part elsewhere."""
    if fingerprint is None or pool.sliding or pool.is_part or not pool.tensors:
        return None
    if any(tensor.device.type != "cpu" or not tensor.is_contiguous() for tensor in pool.tensors):
        return None
    return BlockAccess(pool, fence, fingerprint)


def space_of(pool: KVPool, fingerprint: Fingerprint) -> bytes:
    """A digest of all that a block's bytes depend on, but what its name says: two workers of one space may share it."""
    parts = {name: getattr(fingerprint, name) for name in fingerprint.__struct_fields__ if name not in TEXT_PARTS}
    layout = [(str(tensor.dtype), list(tensor.shape[1:])) for tensor in pool.tensors]
    said = msgspec.msgpack.encode([sorted(parts.items()), layout, pool.block_size])
    return hashlib.blake2b(said, digest_size=SPACE_BYTES, person=b"pageant-space").digest()


def _as_bytes(tensor: torch.Tensor) -> Bytes:  # [num_blocks, bytes of a block]
    flat: Bytes = tensor.view(torch.uint8).flatten(1).numpy()
    return flat
