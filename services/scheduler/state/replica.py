"""One worker as the scheduler knows it: its blocks, its rows, its queue, the steps that it has not answered."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.clock import Clock
from services.scheduler.state.fairness import Shares
from services.scheduler.state.queues import WaitingQueue, by_rank
from services.scheduler.state.sequence import Sequence, Status
from services.scheduler.state.step import Step
from shared.messages import WorkerCapacity


class Replica:
    """State of one worker's life; another life is another Replica.

    Invariant: `running` is ordered by rank and its members hold distinct rows; a waiting sequence holds no block.
    """

    def __init__(
        self, instance: str, epoch: int, capacity: WorkerCapacity, shares: Shares, clock: Clock | None = None
    ) -> None:
        self.instance = instance
        self.epoch = epoch
        self.capacity = capacity
        self.block_size = capacity.block_size
        self.pool = BlockPool(capacity.num_blocks, clock or Clock())
        self.waiting = WaitingQueue(shares)
        self.running: list[Sequence] = []
        self.num_rows: Counter[str] = Counter()  # held, by tenant
        self.in_flight: deque[Step] = deque()
        self.num_steps = 0
        self.released_rows: list[int] = []
        self._free_rows = list(range(capacity.max_num_seqs - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def is_shared(self) -> bool:
        """Whether sequences wait, and those here belong to more than one tenant."""
        return bool(self.waiting) and len(self.num_rows.keys() | self.waiting.tenants) > 1

    @property
    def load(self) -> int:
        """Work in hand, in tokens: what waits to be computed and what is being held."""
        return self.waiting.num_tokens + sum(sequence.num_tokens for sequence in self.running)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a sequence can come to its end here, alone if need be."""
        longest = sequence.request.max_length
        return longest <= self.capacity.max_model_len and self.blocks_for(longest) <= self.capacity.num_blocks

    def is_kind_of(self, sequence: Sequence) -> bool:
        """Whether a sequence that has output goes on here with the same bits."""
        return sequence.request.bound_to in ("", self.capacity.fingerprint)

    def can_serve(self, sequence: Sequence) -> bool:
        return self.is_kind_of(sequence) and self.has_room(sequence)

    def start(self, sequence: Sequence) -> None:
        """Move a sequence from waiting to running and give it a row."""
        self.waiting.remove(sequence)
        if not sequence.request.bound_to:
            sequence.request.fingerprint = self.capacity.fingerprint
        sequence.row = self._free_rows.pop()
        self.num_rows[sequence.tenant] += 1
        insort(self.running, sequence, key=by_rank)

    def share(self, sequence: Sequence, block_ids: list[int], generations: list[int]) -> None:
        """Begin a sequence's table with blocks that others have filled."""
        self.pool.share(block_ids)
        sequence.block_ids, sequence.block_generations = block_ids, generations

    def grow(self, sequence: Sequence, count: int) -> list[int]:
        """Add so many blocks to a sequence's table; returns them.  At least that many must be available."""
        pool = self.pool
        new_blocks = pool.allocate(count)
        sequence.block_ids += new_blocks
        sequence.block_generations += [pool.generations[block] for block in new_blocks]
        return new_blocks

    def register_full(self, sequence: Sequence) -> None:
        """Make a running sequence's blocks findable that are full of known tokens and are computed by the plans sent so
        far: plans run in order, so a sequence that finds one reads it after it was written."""
        hashes = sequence.hash_blocks(self.block_size)
        num_full = min(sequence.num_computed_tokens // self.block_size, len(hashes))
        for index in range(sequence.num_registered_blocks, num_full):
            self.pool.register(sequence.block_ids[index], hashes[index], sequence.block_generations[index])
        sequence.num_registered_blocks = max(sequence.num_registered_blocks, num_full)

    def stop(self, sequence: Sequence) -> None:
        """Take row and blocks from a running sequence.

        The release fence: the blocks may be given to another sequence in the very next plan, although a step in
        flight may still write to them.  The link is FIFO and the worker runs one plan after the other on one
        stream, so that write is over before the next plan's first.  A second stream in the worker would break this.
        """
        del self.running[bisect_left(self.running, sequence.rank, key=by_rank)]
        tenant = sequence.tenant
        self.num_rows[tenant] -= 1
        if not self.num_rows[tenant]:
            del self.num_rows[tenant]
        self._free_rows.append(sequence.row)
        self.released_rows.append(sequence.row)
        sequence.row = -1
        self.pool.release(sequence.block_ids)
        sequence.block_ids, sequence.block_generations = [], []
        sequence.num_registered_blocks = 0

    def preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence but its tokens; it is computed again when its turn comes."""
        self.stop(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0

    def take_released_rows(self) -> list[int]:
        rows, self.released_rows = self.released_rows, []
        return rows

    @property
    def free_rows(self) -> list[int]:
        return list(self._free_rows)

    @free_rows.setter
    def free_rows(self, rows: list[int]) -> None:
        self._free_rows = list(rows)
