"""Where the steps of a prompt end at a worker that keeps states, and which snapshots of them are taken.

Two places of a prompt are worth a snapshot: the end of its last block that can be a hit, for siblings and for what
follows on the prompt; and the end of what other sequences have in common with it, as far as their blocks are known.
A snapshot costs a step, so none is taken near to one that there is.
"""

from __future__ import annotations

from services.scheduler.blocks.snapshots import Snapshot
from services.scheduler.planning.prefixes import Prefixes
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence
from services.scheduler.state.step import Step

LEAST_BLOCKS = 4  # between two snapshots of a prompt


class Checkpoints:
    """Of one worker; without states nothing is cut.

    Invariant: between two plans it holds nothing of a step.
    """

    def __init__(self, replica: Replica, prefixes: Prefixes) -> None:
        self._replica = replica
        self._prefixes = prefixes

    def cut(self, sequence: Sequence, num_computed: int, num_tokens: int) -> int:
        """How many of a prompt's next tokens are computed in one step.

        Where a grammar may be late with what it allows, the last token is computed by itself: it may be computed again,
        and then from the state before its step.
        """
        if self._replica.snapshots is None:
            return num_tokens
        end = num_computed + num_tokens
        if sequence.request.params.is_held and num_tokens > 1:
            end = min(end, sequence.num_tokens + sequence.num_pending - 1)
        place = self._place(sequence, num_computed)
        if num_computed < place <= end:
            end = place
            self._prefixes.mark(sequence, end)
        return end - num_computed

    def _place(self, sequence: Sequence, num_computed: int) -> int:
        """Where the next snapshot is taken, in tokens; 0: nowhere."""
        snapshots, size = self._replica.snapshots, self._replica.block_size
        names = self._prefixes.usable_hashes(sequence)
        if snapshots is None or not names or not snapshots.pool.size:
            return 0
        first = num_computed // size
        for count in (self._prefixes.num_known(names, first), len(names)):
            if count > first and count - snapshots.last(names, count) >= LEAST_BLOCKS:
                return count * size
        return 0

    def take(self, step: Step) -> None:
        """Note the snapshots that a step takes, as it is sent."""
        if self._replica.snapshots is None:
            return
        ending = self._prefixes.marked(step)
        taken = self._replica.snapshots.take([name for _, name in ending])
        for (sequence, _), snapshot in zip(ending, taken, strict=True):
            if snapshot is not None:
                step.saves[sequence] = snapshot

    def load(self, sequence: Sequence, num_blocks: int) -> Snapshot | None:
        """What a sequence begins with that has so many blocks of the cache."""
        if self._replica.snapshots is None or not num_blocks:
            return None
        return self._replica.snapshots.use(sequence.hash_blocks(self._replica.block_size)[num_blocks - 1])
