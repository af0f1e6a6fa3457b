"""The blocks of one worker: their holders, their contents, and the order in which they are given out.

    held       reference count > 0
    cached     reference count 0, contents worth keeping under a hash; on the free list
    free       reference count 0, no hash; on the free list

held + cached + free = size, always.  Unhashed blocks are given out before cached ones, and of the cached ones the
least recently used first; last of all those that their requests asked to be kept (`retention.py`).

A block's generation grows whenever it is given to a new owner.  A sequence keeps the generation in which it was given
each of its blocks, and plans name both.  The worker knows the newest generation, and so finds a block that was given to
another owner since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice

from services.scheduler.blocks.clock import Clock
from services.scheduler.blocks.contents import BlockContents
from services.scheduler.blocks.free_list import FreeList
from services.scheduler.blocks.name_times import NameTimes
from services.scheduler.blocks.pool_events import PoolEvents
from services.scheduler.blocks.retention import RetainedBlocks, Retention

MAX_GHOSTS = 1 << 16  # names of evicted blocks that are kept


class BlockPool:
    """Descriptors of `size` blocks, allocated once."""

    def __init__(
        self, size: int, clock: Clock | None = None, weight: Callable[[str], float] = lambda tenant: 1.0
    ) -> None:
        """`weight`: of a tenant, where blocks are retained."""
        self._clock = clock = clock or Clock()
        self.size = size
        self.ref_counts = [0] * size
        self.generations = [0] * size
        self.hashes: list[bytes | None] = [None] * size
        self.hash_generations = [0] * size  # in which a block got its hash
        self.num_evictions = 0
        self._by_hash: dict[bytes, int] = {}
        self._free = FreeList(size)
        self._retained = RetainedBlocks(size, clock, weight)
        self.evicted = NameTimes(min(size, MAX_GHOSTS))  # names of what was evicted, and when
        self.events: PoolEvents | None = None  # where they are published
        self.contents: BlockContents | None = None  # where blocks are reused in part
        self.named: deque[tuple[int, int]] | None = None  # blocks that got names, with generations, the latest

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self._free.size + len(self._retained)

    @property
    def num_held(self) -> int:
        return self.size - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence holds but that a prefix hit can bring back."""
        return sum(1 for block in self.available if self.hashes[block] is not None)

    @property
    def available(self) -> Iterable[int]:
        """Available blocks in the order in which they will be given out."""
        return chain(self._free, self._retained)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting cached contents where it must; at least that many must be available."""
        if self._retained:
            self._free.extend(self._retained.expire())
        num_plain, hashes = min(count, self._free.size), self.hashes
        blocks = self._free.take(num_plain)
        if num_plain < count:
            blocks += self._retained.take(count - num_plain)
        for block in blocks:
            if hashes[block] is not None:
                self._forget(block)
            self.ref_counts[block] = 1
            self.generations[block] += 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more: a prefix hit, or a sibling's prompt."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                (self._retained if block in self._retained else self._free).remove(block)
            self.ref_counts[block] += 1

    def release(self, blocks: Sequence[int], retention: Retention | None = None) -> None:
        """Let go of a table.  Its tail is reused before its head, since a prefix serves more requests.  With a
        `retention` what is cached of it is kept before others."""
        ref_counts, hashes = self.ref_counts, self.hashes
        named: list[int] = []
        nameless: list[int] = []
        for block in reversed(blocks):
            ref_counts[block] -= 1
            if ref_counts[block] == 0:
                (nameless if hashes[block] is None else named).append(block)
        self._free.extend(named if retention is None else self._retained.add(named, retention))
        self._free.extend_left(nameless)

    def register(self, block: int, block_hash: bytes, generation: int, *, is_tail: bool = False) -> None:
        """Make a block findable that was filled in this generation.  Where another block has these contents already,
        that one stays.  A tail is for copying from alone."""
        if self.hashes[block] is None and block_hash not in self._by_hash and self.generations[block] == generation:
            self.hashes[block] = block_hash
            self.hash_generations[block] = generation
            self._by_hash[block_hash] = block
            if self.events is not None:
                self.events.named(block_hash)
            if self.named is not None and not is_tail:
                self.named.append((block, generation))

    def keep_named(self) -> None:
        """From now on remember which blocks get names."""
        self.named = deque(maxlen=self.size)

    def name_again(self) -> None:
        """As if all that can be found had been named just now."""
        if self.named is not None:
            self.named.clear()
            blocks = map(self._by_hash.__getitem__, self.names)
            self.named.extend((block, self.hash_generations[block]) for block in blocks)

    def _is_whole(self, name: bytes) -> bool:
        return self.contents is None or not self.contents.is_tail(name)

    def name_of(self, block: int, generation: int) -> bytes | None:
        """Of what a block holds, if it is still in this generation."""
        return self.hashes[block] if self.generations[block] == self.hash_generations[block] == generation else None

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix; not held until `share`."""
        found = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_cached_of(self, hashes: Iterable[bytes]) -> int:
        """How many blocks `lookup` would find."""
        known, count = self._by_hash, 0
        for block_hash in hashes:
            if block_hash not in known:
                break
            count += 1
        return count

    @property
    def has_readers(self) -> bool:
        """Whether the tokens of its blocks are of use."""
        return self.events is not None or self.contents is not None

    def block_of(self, block_hash: bytes) -> int:
        """The block that can be found by this name; KeyError where there is none."""
        return self._by_hash[block_hash]

    @property
    def names(self) -> Iterable[bytes]:
        """Of all full blocks that can be found."""
        return self._by_hash.keys() if self.contents is None else filter(self._is_whole, self._by_hash)

    def knows(self, block_hash: bytes) -> bool:
        """Whether a block of this name can be found."""
        return block_hash in self._by_hash

    def num_held_of(self, blocks: Iterable[int]) -> int:
        """How many of these are held, so that sharing them takes nothing from the available ones."""
        return sum(1 for block in blocks if self.ref_counts[block] > 0)

    def distrust(self, block: int, generation: int) -> None:
        """Make a block unfindable by its hash, and its next generation greater than `generation`."""
        self.generations[block] = max(self.generations[block], generation)
        self._forget(block)

    def end_life(self, block: int, generation: int) -> None:
        """The block was never written in this generation: it is invalid for its holders of that generation."""
        if self.generations[block] == generation:
            self.distrust(block, generation + 1)

    def agrees(self, held: Mapping[int, int], window: range) -> bool:
        """Whether the ledger agrees with `held`, which has how often each block stands in a table.

        Counts are compared for all blocks; the free list and the hashes, which take longer, for those of the window.
        """
        expected = [0] * self.size
        for block, count in held.items():
            expected[block] = count
        return (
            expected == self.ref_counts
            and len(held) + self.num_available == self.size
            and len(self._by_hash) + self.hashes.count(None) == self.size
            and all((block in self._free) is (expected[block] == 0 and block not in self._retained) for block in window)
            and all(self._by_hash.get(name) == block for block in window if (name := self.hashes[block]) is not None)
        )

    def recount(self, held: Mapping[int, int]) -> tuple[int, int]:
        """Correct the ledger by the tables.  Returns how many blocks were counted although no sequence held them, and
        how many are held although they were free, or counted too few times."""
        counted = self.ref_counts
        self.ref_counts = [held.get(block, 0) for block in range(self.size)]
        available = (*islice(self._free, self.size), *self._retained)
        free = dict.fromkeys(block for block in available if block not in held)
        self._retained.clear()
        leaked = [block for block in range(self.size) if block not in held and block not in free]
        self._free.rebuild([*free, *leaked])
        for block, name in enumerate(self.hashes):
            if name is not None and self._by_hash.get(name) != block:
                self.hashes[block] = None
        self._by_hash = {name: block for block, name in enumerate(self.hashes) if name is not None}
        if self.events is not None:
            self.events.only(self._by_hash)
        num_lost = sum(1 for before, count in zip(counted, self.ref_counts, strict=True) if before < count)
        num_leaked = sum(1 for before, count in zip(counted, self.ref_counts, strict=True) if before > count)
        return max(num_leaked, len(leaked)), num_lost

    def _forget(self, block: int) -> None:
        block_hash = self.hashes[block]
        if block_hash is not None:
            self.hashes[block] = None
            del self._by_hash[block_hash]
            self.num_evictions += 1
            self.evicted.note(block_hash, self._clock.now)
            if self.events is not None:
                self.events.forgotten(block_hash)
            if self.contents is not None:
                self.contents.forget(block_hash)
