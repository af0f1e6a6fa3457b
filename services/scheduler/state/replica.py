"""One worker as the scheduler knows it: its blocks, its rows, its queue, the steps that it has not answered."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.clock import Clock
from services.scheduler.blocks.contents import BlockContents
from services.scheduler.blocks.prefix_cache import tail_hash
from services.scheduler.blocks.sliding import PrefixHit, SlidingBlocks, SlidingTable, longest_hit
from services.scheduler.blocks.snapshots import Snapshots
from services.scheduler.blocks.stores import StoreIndex
from services.scheduler.state.adapters import ReplicaAdapters
from services.scheduler.state.fairness import Shares, is_background
from services.scheduler.state.moves import ReplicaMoves
from services.scheduler.state.peers import Lender, Peers
from services.scheduler.state.queues import WaitingQueue, by_rank
from services.scheduler.state.sequence import Request, Sequence, Status
from services.scheduler.state.step import Step
from shared.messages import WorkerCapacity


class Replica:
    """State of one worker's life; another life is another Replica.

    Invariant: `running` is ordered by rank and its members hold distinct rows; a waiting sequence holds no block.

    Background sequences rest while another is here, running or waiting: those that run keep their rows and blocks,
    until another lacks them.  By their rank they are the last of `running`.
    """

    def __init__(
        self,
        instance: str,
        epoch: int,
        capacity: WorkerCapacity,
        shares: Shares,
        clock: Clock | None = None,
        stores: StoreIndex | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.instance = instance
        self.epoch = epoch
        self.capacity = capacity
        self.block_size = capacity.block_size
        clock = clock or Clock()
        self.pool = BlockPool(capacity.num_blocks, clock, shares.weight)
        self.sliding = [
            SlidingBlocks(one.window, one.num_blocks, capacity.block_size, clock) for one in capacity.sliding
        ]
        self.pools = [self.pool, *(one.pool for one in self.sliding)]
        self.snapshots = Snapshots(capacity.num_snapshots, clock) if capacity.keeps_states else None
        stores = StoreIndex() if stores is None else stores
        self.moves = ReplicaMoves(self.pool, epoch, capacity, stores, clock, Peers() if peers is None else peers)
        self.prefills: dict[Request, str] = {}  # of which only full blocks are computed here; where they go on
        self.waiting = WaitingQueue(shares)
        self.adapters = ReplicaAdapters(capacity)
        self.running: list[Sequence] = []
        self.num_background = 0  # of `running`
        self.num_rows: Counter[str] = Counter()  # held, by tenant
        self.in_flight: deque[Step] = deque()
        self.num_steps = 0
        self.released_rows: list[int] = []
        self.free_rows = list(range(capacity.max_num_seqs - 1, -1, -1))

    @property
    def has_partial_hits(self) -> bool:
        """Whether a prefix of which the first pool has all blocks may be no hit, or a shorter one."""
        return bool(self.sliding) or self.snapshots is not None

    @property
    def lender(self) -> Lender:
        """What other workers have of it."""
        return self.moves

    @property
    def num_free_rows(self) -> int:
        return len(self.free_rows)

    @property
    def is_shared(self) -> bool:
        """Whether sequences wait, and those here belong to more than one tenant."""
        if not self.waiting:
            return False
        tenants = self.num_rows.keys() | self.waiting.tenants
        if self.is_resting:
            has_waiting = len(self.waiting) > self.waiting.num_background
            return has_waiting and sum(not is_background(tenant) for tenant in tenants) > 1
        return len(tenants) > 1

    # -- background sequences

    @property
    def has_foreground(self) -> bool:
        return len(self.running) > self.num_background or len(self.waiting) > self.waiting.num_background

    @property
    def has_background(self) -> bool:
        return self.num_background > 0 or self.waiting.num_background > 0

    @property
    def is_resting(self) -> bool:
        """Whether there are background sequences, which have no part in any step now."""
        return self.has_background and self.has_foreground

    @property
    def is_in_background(self) -> bool:
        """Whether there are background sequences only."""
        return (self.num_background > 0 or self.waiting.num_background > 0) and not self.has_foreground

    @property
    def num_resting(self) -> int:
        """Of the running ones."""
        return self.num_background if self.num_background and self.has_foreground else 0

    @property
    def num_active(self) -> int:
        return len(self.running) - self.num_resting

    @property
    def active(self) -> list[Sequence]:
        """The running ones that may have a part in the next step."""
        return self.running[: -self.num_background] if self.num_resting else self.running

    def num_held_by_foreground(self) -> list[int]:
        """Blocks of each pool that background sequences do not hold alone."""
        if not self.num_background:
            return [pool.num_held for pool in self.pools]
        columns = zip(*(s.tables for s in self.running[: -self.num_background]), strict=True)
        held = [len(set().union(*(table.block_ids for table in tables))) for tables in columns]
        return held or [0] * len(self.pools)

    # -- blocks and rows

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def longest_chunk(self) -> int:
        """Tokens that a sequence can compute at once, for the blocks of its windows."""
        longest, whole = sys.maxsize, self.blocks_for(self.capacity.max_model_len)
        return min((one.longest_chunk for one in self.sliding if one.pool.size < whole), default=longest)

    def end_of(self, sequence: Sequence) -> int:
        """Tokens of a sequence that are computed here, at most: where only its full blocks are, none that is sampled
        from."""
        num_tokens = sequence.num_tokens + sequence.num_pending
        if self.prefills and sequence.request in self.prefills:
            return (num_tokens - 1) // self.block_size * self.block_size
        return num_tokens

    def num_wanted(self, sequence: Sequence) -> int:
        """Tokens of a running sequence that are still to be computed here."""
        return self.end_of(sequence) - sequence.num_computed_tokens

    def is_in_step(self, sequence: Sequence) -> bool:
        """Whether a step in flight here has a part of it.  One that was handed over may be in one of its former
        worker: it is passed over until that is answered."""
        return sequence.num_in_flight > 0 and any(sequence in step.sequences for step in self.in_flight)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a sequence can come to its end here, alone if need be.  Of its windows there always is room for one
        sequence: otherwise a worker is not let in."""
        longest = sequence.request.max_length
        return longest <= self.capacity.max_model_len and self.blocks_for(longest) <= self.capacity.num_blocks

    def can_serve(self, sequence: Sequence) -> bool:
        """Whether there is room for it, adapters are served if it has one, and it goes on here with the same bits if it
        has output."""
        request = sequence.request
        is_of_kind = request.bound_to in ("", self.capacity.fingerprint)
        return is_of_kind and (not request.adapter or self.capacity.max_loras > 0) and self.has_room(sequence)

    def start(self, sequence: Sequence) -> None:
        """Move a sequence from waiting to running and give it a row."""
        self.waiting.remove(sequence)
        if not sequence.request.bound_to:
            sequence.request.fingerprint = self.capacity.fingerprint
        sequence.row = self.free_rows.pop()
        if adapter := sequence.request.adapter:
            self.adapters.start(adapter)
        self.num_rows[sequence.tenant] += 1
        self.num_background += sequence.is_background
        insort(self.running, sequence, key=by_rank)

    def find(self, names: Seq[bytes]) -> PrefixHit:
        """The longest cached prefix of a sequence whose blocks have these names."""
        return longest_hit(self.pool, self.sliding, names, self.snapshots)

    def share_hit(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Begin a sequence's tables with what the prefix cache has of it."""
        end = len(hit.blocks)
        if self.pool.has_readers:
            self.learn(sequence, range(end))  # what was not computed here has come from elsewhere
        sliding = [one.table_of(end, found) for one, found in zip(self.sliding, hit.windows, strict=True)]
        self._share(sequence, hit.blocks, [self.pool.hash_generations[block] for block in hit.blocks], sliding)

    def share_with(self, sequence: Sequence, source: Sequence, num_computed: int) -> int:
        """Begin a sequence's tables with the full blocks of another one's first tokens; returns how many places."""
        end = num_computed // self.block_size
        sliding = [
            table.part(max(table.first, one.first_place(num_computed)), end)
            for one, table in zip(self.sliding, source.sliding, strict=True)
        ]
        self._share(sequence, source.block_ids[:end], source.block_generations[:end], sliding)
        return end

    def _share(
        self, sequence: Sequence, block_ids: list[int], generations: list[int], sliding: list[SlidingTable]
    ) -> None:
        self.pool.share(block_ids)
        for one, table in zip(self.sliding, sliding, strict=True):
            one.pool.share(table.block_ids)
        sequence.block_ids, sequence.block_generations, sequence.sliding = block_ids, generations, sliding

    def num_missing(self, sequence: Sequence, length: int) -> list[int]:
        """Blocks of each pool that a sequence lacks for so many tokens; none where that is not positive."""
        wanted = self.blocks_for(length)
        missing = [wanted - len(sequence.block_ids)]
        return missing + [wanted - table.end for table in sequence.sliding] if sequence.sliding else missing

    def can_grow(self, sequence: Sequence, missing: Iterable[int], reserve: int = 0) -> bool:
        """Whether there are these blocks, and the `reserve` beside them, once its windows have moved on."""
        if not sequence.sliding:
            (count,) = missing
            return count <= 0 or count <= self.pool.num_available - reserve
        freed = [0, *(one.num_freed(table, sequence.num_computed_tokens) for one, table in self._windows(sequence))]
        columns = zip(self.pools, missing, freed, strict=True)
        return all(count <= 0 or count <= pool.num_available - reserve + more for pool, count, more in columns)

    def room_in_windows(self, sequence: Sequence, num_computed: int, reserve: int = 0) -> int:
        """Tokens behind those computed for which there are blocks in all sliding pools, and the `reserve` beside them;
        one at least."""
        ends = [
            table.end + one.pool.num_available - reserve + one.num_freed(table, num_computed)
            for one, table in self._windows(sequence)
        ]
        return max(1, min(ends) * self.block_size - num_computed) if ends else sys.maxsize

    def grow(self, sequence: Sequence, count: int, *sliding: int) -> list[int]:
        """Move a sequence's windows on, and add so many blocks to its tables, at least that many of which must be
        available; returns those of layers without a window.  The plan that is being made must have a part for it."""
        if sliding:
            for (one, table), missing in zip(self._windows(sequence), sliding, strict=True):
                one.slide(table, sequence.num_computed_tokens)
                one.grow(table, max(0, missing))
        pool = self.pool
        new_blocks = pool.allocate(max(0, count))
        sequence.block_ids += new_blocks
        sequence.block_generations += [pool.generations[block] for block in new_blocks]
        return new_blocks

    def is_at_edge(self, sequence: Sequence, length: int) -> bool:
        """Whether its windows give up or need blocks for so many tokens."""
        num_computed, wanted = sequence.num_computed_tokens, self.blocks_for(length)
        return any(
            one.first_place(num_computed) > table.first or wanted > table.end for one, table in self._windows(sequence)
        )

    def _windows(self, sequence: Sequence) -> Iterable[tuple[SlidingBlocks, SlidingTable]]:
        return zip(self.sliding, sequence.sliding, strict=True)

    def register_full(self, sequence: Sequence) -> None:
        """Make a running sequence's blocks findable that are full of known tokens and are computed by the plans sent so
        far: plans run in order, so a sequence that finds one reads it after it was written."""
        hashes = sequence.hash_blocks(self.block_size)
        num_full = min(sequence.num_computed_tokens // self.block_size, len(hashes))
        first = sequence.num_registered_blocks
        for index in range(first, num_full):
            self.pool.register(sequence.block_ids[index], hashes[index], sequence.block_generations[index])
            for one, table in self._windows(sequence) if self.sliding else ():
                if (place := index - table.first) >= 0:
                    one.pool.register(table.block_ids[place], hashes[index], table.generations[place])
        if self.pool.has_readers:
            self.learn(sequence, range(first, num_full))
        sequence.num_registered_blocks = max(first, num_full)

    def learn(self, sequence: Sequence, places: range) -> None:
        """What blocks of a sequence hold, for prompts that begin like them and for events of the pool; events tell
        nothing of salted ones."""
        header, events, contents = sequence.request.header, self.pool.events, self.pool.contents
        if contents is not None:
            size, names = self.block_size, sequence.hash_blocks(self.block_size)
            for place in places:
                if self.pool.knows(names[place]):
                    parent = names[place - 1] if place else sequence.request.root
                    contents.learn(names[place], parent, sequence.token_ids[place * size : (place + 1) * size])
        if events is not None and not header.cache_salt:
            adapter = header.adapter.name if header.adapter is not None else ""
            events.learn(sequence.hash_blocks(self.block_size), places, sequence.token_ids, adapter)

    def stop(self, sequence: Sequence) -> None:
        """Take row and blocks from a running sequence.

        The release fence: the blocks may be given to another sequence in the very next plan, although a step in
        flight may still write to them.  The link is FIFO and the worker runs one plan after the other on one
        stream, so that write is over before the next plan's first.  A second stream in the worker would break this.
        """
        del self.running[bisect_left(self.running, sequence.rank, key=by_rank)]
        self.num_background -= sequence.is_background
        if adapter := sequence.request.adapter:
            self.adapters.stop(adapter)
        tenant = sequence.tenant
        self.num_rows[tenant] -= 1
        if not self.num_rows[tenant]:
            del self.num_rows[tenant]
        self.free_rows.append(sequence.row)
        self.released_rows.append(sequence.row)
        sequence.row = -1
        if self.pool.contents is not None:
            self._name_tail(sequence, self.pool.contents)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table.block_ids, sequence.request.retention)
        sequence.block_ids, sequence.block_generations, sequence.sliding = [], [], []
        sequence.num_registered_blocks = 0

    def _name_tail(self, sequence: Sequence, contents: BlockContents) -> None:
        """Make findable what plans so far computed of a sequence's last block, and the full ones whose last token was
        not known when their plan was made."""
        self.register_full(sequence)
        size, num_known = self.block_size, min(sequence.num_computed_tokens, sequence.num_tokens)
        place, num_over = divmod(num_known, size)
        if num_over and place < len(sequence.block_ids) and self.pool.ref_counts[sequence.block_ids[place]] == 1:
            parent = sequence.hash_blocks(size)[place - 1] if place else sequence.request.root
            tokens = sequence.token_ids[num_known - num_over : num_known]
            name, block = tail_hash(parent, tokens), sequence.block_ids[place]
            self.pool.register(block, name, sequence.block_generations[place], is_tail=True)
            if self.pool.knows(name):
                contents.learn(name, parent, tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence but its tokens; it is computed again when its turn comes."""
        self.stop(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0

    def take_released_rows(self) -> list[int]:
        rows, self.released_rows = self.released_rows, []
        return rows
