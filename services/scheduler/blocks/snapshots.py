"""Snapshots of the states that one worker's layers of linear attention keep.

A state is that behind one token, so a prefix in blocks can be gone on with only where a snapshot of its state was
taken.  Snapshots have names as blocks have: that of the block at whose end they stand.  No sequence holds one: a worker
loads before a step and saves behind it, and runs plans in order, so a snapshot that one plan loads may be given to
another state in the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.clock import Clock

Snapshot = tuple[int, int]  # its number, and the generation in which it was taken


class Snapshots:
    """Those of one worker; the least recently used goes first.

    Invariant: between two plans all are available.
    """

    def __init__(self, size: int, clock: Clock) -> None:
        self.pool = BlockPool(size, clock)

    def last(self, names: Sequence[bytes], end: int) -> int:
        """The number of the first blocks, `end` at most, behind which a snapshot was taken; 0: there is none."""
        knows = self.pool.knows
        return next((count for count in range(end, 0, -1) if knows(names[count - 1])), 0)

    def use(self, name: bytes) -> Snapshot:
        """The snapshot of this name, which is there; it becomes the most recently used."""
        found = self.pool.lookup([name])
        self.pool.share(found)
        self.pool.release(found)
        return found[0], self.pool.hash_generations[found[0]]

    def take(self, names: Sequence[bytes]) -> list[Snapshot | None]:
        """Snapshots to be saved by one plan, under these names; None: one has the name, or all are being saved."""
        pool, taken = self.pool, list[Snapshot | None]()
        for name in names:
            if pool.knows(name) or not pool.num_available:
                taken.append(None)
                continue
            (snapshot,) = pool.allocate(1)
            pool.register(snapshot, name, pool.generations[snapshot])
            taken.append((snapshot, pool.generations[snapshot]))
        pool.release([one[0] for one in reversed(taken) if one is not None])
        return taken

    def forget(self, snapshot: int, generation: int) -> None:
        """It was never saved in this generation, or is not what the worker has."""
        if 0 <= snapshot < self.pool.size:
            self.pool.end_life(snapshot, generation)
