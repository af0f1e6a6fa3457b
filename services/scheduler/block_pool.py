"""The blocks of one worker: who holds them, what they contain, which to give out next.

    held       reference count > 0
    cached     reference count 0, contents worth keeping under a hash; on the free list
    free       reference count 0, no hash; on the free list

held + cached + free = size, always.  Unhashed blocks are given out before cached ones, and of the cached ones the
least recently used first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.scheduler.free_list import FreeList
from services.scheduler.ghosts import Ghosts
from services.scheduler.moment import Moment


class BlockPool:
    """Descriptors of `size` blocks, allocated once."""

    def __init__(self, size: int, moment: Moment | None = None) -> None:
        self.size = size
        self.ref_counts = [0] * size
        self.hashes: list[bytes | None] = [None] * size
        self.num_evictions = 0
        self._by_hash: dict[bytes, int] = {}
        self._free = FreeList(size)
        self.ghosts = Ghosts(size, moment or Moment())  # names of what was evicted

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but that a prefix hit can bring back."""
        return sum(1 for block in self._free if self.hashes[block] is not None)

    @property
    def available(self) -> Iterable[int]:
        """Available blocks in the order in which they will be given out."""
        return iter(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting cached contents where it must; at least that many must be available."""
        blocks = []
        for _ in range(count):
            block = self._free.pop()
            self._forget(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more: a prefix hit, or a sibling's prompt."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                self._free.remove(block)
            self.ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a table.  Its tail is reused before its head, since a prefix serves more requests."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if self.hashes[block] is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a full block findable.  Where another block has these contents already, that one stays."""
        if self.hashes[block] is None and block_hash not in self._by_hash:
            self.hashes[block] = block_hash
            self._by_hash[block_hash] = block

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix; not held until `share`."""
        found = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    @property
    def names(self) -> Iterable[bytes]:
        """Of all blocks that can be found."""
        return self._by_hash.keys()

    def knows(self, block_hash: bytes) -> bool:
        """Whether a block of this name can be found."""
        return block_hash in self._by_hash

    def num_held_of(self, blocks: Iterable[int]) -> int:
        """How many of these somebody holds, so that sharing them takes nothing from the available ones."""
        return sum(1 for block in blocks if self.ref_counts[block] > 0)

    def _forget(self, block: int) -> None:
        block_hash = self.hashes[block]
        if block_hash is not None:
            self.hashes[block] = None
            del self._by_hash[block_hash]
            self.num_evictions += 1
            self.ghosts.add(block_hash)
