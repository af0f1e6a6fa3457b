"""Blocks of the layers that see a window of the latest tokens only, which share a pool of their own.

A sequence's table keeps its places, as in the table of the other layers: place i is for the tokens from i * block_size
on.  The blocks whose tokens all lie before the window are given back while the sequence goes on; under their names they
can be found until they are evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.clock import Clock
from services.scheduler.blocks.snapshots import Snapshots


@dataclass(eq=False, slots=True)
class SlidingTable:
    """The blocks of places `first` ... `end` - 1 of one sequence."""

    first: int = 0
    block_ids: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)  # parallel: in which of its lives each block is ours
    sent_first: int = 0  # what the plans so far have told the worker
    sent_end: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.block_ids)

    def part(self, first: int, end: int) -> SlidingTable:
        """A table that begins with the blocks of these places, for another sequence."""
        places = slice(first - self.first, end - self.first)
        return SlidingTable(first, self.block_ids[places], self.generations[places])


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached blocks of the longest prefix that every pool can supply; not held until they are shared."""

    blocks: list[int]
    windows: list[list[int]] = field(default_factory=list)  # of each sliding pool, those before the prefix's end


class SlidingBlocks:
    """The pool of the layers with one window, at one worker."""

    def __init__(self, window: int, size: int, block_size: int, clock: Clock) -> None:
        self.window = window
        self.pool = BlockPool(size, clock)
        self.block_size = block_size

    def first_place(self, num_computed: int) -> int:
        """The first place that a sequence needs to go on behind so many tokens.

        That is one token more than the next one sees: where a sample is put off, the last token is computed again.
        """
        return max(0, num_computed - self.window) // self.block_size

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at most while it computes so many tokens at once."""
        return min(self.pool.size, -(-(self.window + num_tokens) // self.block_size) + 1)

    @property
    def longest_chunk(self) -> int:
        """Tokens that a sequence can compute at once if all the pool is its own."""
        return (self.pool.size - -(-self.window // self.block_size) - 1) * self.block_size

    def num_freed(self, table: SlidingTable, num_computed: int) -> int:
        """Blocks that become available when the window moves on."""
        leaving = table.block_ids[: max(0, self.first_place(num_computed) - table.first)]
        return sum(1 for block in leaving if self.pool.ref_counts[block] == 1)

    def slide(self, table: SlidingTable, num_computed: int) -> None:
        """Give back the blocks that lie before the window."""
        count = self.first_place(num_computed) - table.first
        if count > 0:
            self.pool.release(table.block_ids[:count])
            del table.block_ids[:count], table.generations[:count]
            table.first += count

    def grow(self, table: SlidingTable, count: int) -> None:
        """Append so many blocks, which must be available."""
        new_blocks = self.pool.allocate(count)
        table.block_ids += new_blocks
        table.generations += [self.pool.generations[block] for block in new_blocks]

    def table_of(self, end: int, found: Sequence[int]) -> SlidingTable:
        """Of a sequence that begins with cached blocks, the last of which is that before place `end`."""
        return SlidingTable(end - len(found), list(found), [self.pool.hash_generations[block] for block in found])

    def last_gap(self, names: Sequence[bytes], end: int) -> int:
        """The last place of the window before place `end` whose block is not cached; -1: there is none."""
        for place in range(end - 1, self.first_place(end * self.block_size) - 1, -1):
            if not self.pool.knows(names[place]):
                return place
        return -1

    def lookup(self, names: Sequence[bytes], end: int) -> list[int]:
        """The cached blocks of the window before place `end`."""
        return self.pool.lookup(names[self.first_place(end * self.block_size) : end])


def longest_hit(
    pool: BlockPool, sliding: Sequence[SlidingBlocks], names: Sequence[bytes], snapshots: Snapshots | None = None
) -> PrefixHit:
    """The longest prefix of which `pool` has all blocks, and each sliding pool those of the window before its end;
    where states are kept, one at whose end a snapshot was taken."""
    blocks = pool.lookup(names)
    if not sliding and snapshots is None:
        return PrefixHit(blocks)
    end = len(blocks)
    while end:
        end = end if snapshots is None else snapshots.last(names, end)
        gap = max((one.last_gap(names, end) for one in sliding), default=-1)
        if gap < 0:
            break
        end = gap  # every prefix between the two has this place in its window
    return PrefixHit(blocks[:end], [one.lookup(names, end) for one in sliding])
