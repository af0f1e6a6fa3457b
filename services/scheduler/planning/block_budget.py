"""What waiting sequences need of a worker's blocks before they can start."""

from __future__ import annotations

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.sliding import PrefixHit, SlidingBlocks
from services.scheduler.planning.forking import can_fork
from services.scheduler.planning.prefixes import Prefixes
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence


class BlockBudget:
    """Counts blocks; takes none.  A list has a number for each pool of the worker."""

    def __init__(self, replica: Replica, prefixes: Prefixes, max_num_batched_tokens: int) -> None:
        self._replica = replica
        self._prefixes = prefixes
        self._longest_step = max_num_batched_tokens

    @property
    def reserve(self) -> int:
        """Blocks left to the running sequences to grow into, one each: an admission must not preempt at once."""
        return self._replica.num_active

    def num_blocks(self, sequence: Sequence) -> int:
        """Blocks without which a sequence is not admitted: those of its tokens.  A protected one gets all blocks that
        it can come to need, so that no sequence is preempted for it later."""
        return self._replica.blocks_for(sequence.request.max_length if sequence.is_protected else sequence.num_tokens)

    def num_lacking(self, sequence: Sequence, others: list[Sequence]) -> list[int]:
        """Blocks that would have to become free before it can start, after these others that have not yet; none where
        this is not positive."""
        if can_fork(self._replica, sequence):
            return self.num_lacking_to_fork()
        promised = sum(self._replica.blocks_for(other.num_tokens) for other in others)
        first, *windows = self.num_lacking_beside(sequence, self._prefixes.hit(sequence))
        columns = zip(windows, self._replica.sliding, strict=True)
        return [
            first + promised,
            *(count + sum(self._num_in_window(one, other) for other in others) for count, one in columns),
        ]

    def num_lacking_to_fork(self) -> list[int]:
        return [1 + self.reserve - pool.num_available for pool in self._replica.pools]

    def num_lacking_for(self, num_branches: int) -> int:
        """Rows or blocks that so many beams lack that begin behind others, each with a block of its own."""
        num_available = min(pool.num_available for pool in self._replica.pools)
        return num_branches - min(self._replica.num_free_rows, num_available - self.reserve)

    def num_lacking_beside(self, sequence: Sequence, hit: PrefixHit) -> list[int]:
        """As `num_lacking`, where these blocks are found in the cache."""
        lacking = [self._num_lacking(self._replica.pool, self.num_blocks(sequence), hit.blocks)]
        for one, found in zip(self._replica.sliding, hit.windows, strict=True):
            lacking.append(self._num_lacking_of(one, sequence, len(hit.blocks), found))
        return lacking

    def _num_lacking(self, pool: BlockPool, wanted: int, found: list[int]) -> int:
        num_left = pool.num_available - (len(found) - pool.num_held_of(found))
        return wanted - len(found) + self.reserve - num_left

    def _num_lacking_of(self, one: SlidingBlocks, sequence: Sequence, end: int, found: list[int]) -> int:
        """Of a sliding pool, for a sequence that begins at place `end`.

        A protected sequence does not hold all the blocks that it will need, since its window gives some back: it is
        admitted where the protected ones could hold theirs at the same time, and then others give way to it.
        """
        wanted = self._num_in_window(one, sequence, first=end - len(found))
        lacking = self._num_lacking(one.pool, wanted, found)
        if not sequence.is_protected:
            return lacking
        promised = [other for other in self._replica.active if other.is_protected]
        together = sum(self._num_in_window(one, other) for other in (*promised, sequence))
        return max(lacking, together - one.pool.size)

    def _num_in_window(self, one: SlidingBlocks, sequence: Sequence, *, first: int = 0) -> int:
        """Blocks that a sequence needs, from place `first` on, to go on: a step computes no more than they allow.  What
        a protected one holds at most."""
        if sequence.is_protected:
            return min(
                self._replica.blocks_for(sequence.request.max_length) - first, one.most_blocks(self._longest_step)
            )
        return min(self._replica.blocks_for(sequence.num_tokens) - first, one.most_blocks(self._replica.block_size))
