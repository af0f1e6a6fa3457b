"""A worker's own blocks, as its data link finds them for other workers.

The step thread says which blocks may be read, in order with the plans; threads of the data link read them while steps
go on.  A block is read in the generation that was said, or not at all: the fence is asked before it is copied and again
behind.  A plan that gives it to a row changes the fence before it writes, so what was copied in between is thrown away.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

from shared.data_link.frames import checksum
from shared.data_link.server import HeldBlock

MAX_SERVED = 1 << 16  # names; those that were said first go first

Life = tuple[int, int, int]  # of the pool, since it was emptied last; the block; its generation


class ReadableBlocks(Protocol):
    """`engine.execution.tables.block_access.BlockAccess`."""

    block_bytes: int
    space: bytes

    @property
    def life(self) -> int: ...

    def num_agreeing(self, blocks: Sequence[int], generations: Sequence[int]) -> int: ...

    def read(self, blocks: Sequence[int], generations: Sequence[int]) -> Any: ...


class ServedBlocks:
    """Invariant: each name stands for a block in one life; in that life the block has the contents of the name."""

    def __init__(self, blocks: ReadableBlocks) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()
        self._lives: OrderedDict[bytes, Life] = OrderedDict()

    def serve(self, names: Sequence[bytes], blocks: Sequence[int], generations: Sequence[int]) -> int:
        """Let others read these from now on, up to one that is in another generation; returns how many."""
        num_agreeing, life = self._blocks.num_agreeing(blocks, generations), self._blocks.life
        with self._lock:
            for name, block, generation in zip(names[:num_agreeing], blocks, generations, strict=False):
                self._lives.pop(name, None)
                self._lives[name] = life, block, generation
            while len(self._lives) > MAX_SERVED:
                self._lives.popitem(last=False)
        return num_agreeing

    def read(self, names: Sequence[bytes]) -> Any:
        """The first of these, up to one that is not there; called by any thread."""
        life = self._blocks.life
        with self._lock:
            found = [self._lives.get(name) for name in names]
        here = []
        for one in found:
            if one is None or one[0] != life:
                break
            here.append(one[1:])
        data = self._blocks.read([block for block, _ in here], [generation for _, generation in here])
        return data if self._blocks.life == life else data[:0]

    def keep(self, space: bytes, name: bytes, block: HeldBlock) -> bool:
        """Blocks come to a worker because it fetches them, and in no other way."""
        return False

    def copy(self, space: bytes, names: Sequence[bytes], block_bytes: int, place: memoryview) -> list[int]:
        """As the data link wants them, with checksums that are made here."""
        if space != self._blocks.space or block_bytes != self._blocks.block_bytes:
            return []
        rows = [memoryview(row) for row in self.read(names)]
        for row, start in zip(rows, count(0, block_bytes), strict=False):
            place[start : start + block_bytes] = row
        return [checksum(row) for row in rows]
