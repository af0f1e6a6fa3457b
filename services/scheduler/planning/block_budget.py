"""What waiting sequences need of a worker's blocks before they can start."""

from __future__ import annotations

from services.scheduler.planning.forking import can_fork
from services.scheduler.planning.prefixes import Prefixes
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence


class BlockBudget:
    """Counts blocks; takes none."""

    def __init__(self, replica: Replica, prefixes: Prefixes) -> None:
        self._replica = replica
        self._prefixes = prefixes

    @property
    def reserve(self) -> int:
        """Blocks left to the running sequences to grow into, one each: an admission must not preempt at once."""
        return len(self._replica.running)

    def num_blocks(self, sequence: Sequence) -> int:
        """Blocks without which a sequence is not admitted: those of its tokens.  A protected one gets all blocks that
        it can come to need, so that no sequence is preempted for it later."""
        return self._replica.blocks_for(sequence.request.max_length if sequence.is_protected else sequence.num_tokens)

    def num_lacking(self, sequence: Sequence, others: list[Sequence]) -> int:
        """Blocks that would have to become free before it can start, after these others that have not yet; none where
        this is not positive."""
        if can_fork(self._replica, sequence):
            return self.num_lacking_to_fork()
        promised = sum(self._replica.blocks_for(other.num_tokens) for other in others)
        return self.num_lacking_beside(sequence, self._prefixes.hits(sequence)) + promised

    def num_lacking_to_fork(self) -> int:
        return 1 + self.reserve - self._replica.pool.num_available

    def num_lacking_beside(self, sequence: Sequence, hits: list[int]) -> int:
        """As `num_lacking`, where these blocks are found in the cache."""
        pool = self._replica.pool
        num_left = pool.num_available - (len(hits) - pool.num_held_of(hits))
        return self.num_blocks(sequence) - len(hits) + self.reserve - num_left
