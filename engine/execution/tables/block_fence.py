"""Keeps a row from blocks that now belong to another row: the worker's side of the generations of blocks.

The scheduler numbers the generations of every block, and sends the generation with each block that it gives to a row.
A row that was given an older generation no longer holds the block, whatever the scheduler assumes: the row is stale
until it is released or admitted again.  A step that gives no row a block costs nothing here.

Blocks that a refused row was to fill stay unwritten, though the scheduler may have given them to other rows as a prefix
already: their generation ends with the refusal, and rows that share them are stale too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from shared.block_digest import digest_blocks
from shared.errors import FatalError
from shared.messages.steps import Refusal, RefusedRow, SlidingPlan, StepPlan

Copies = list[tuple[int, int]]  # (source, destination)


class PoolFence:
    """The blocks of each row in one pool, and their generations.

    Invariant: `_num_holders[b]` rows have block b in its newest known generation, `_newest[b]`.
    """

    def __init__(self, num_rows: int, num_blocks: int, block_size: int) -> None:
        self._num_rows = num_rows
        self.num_blocks = num_blocks
        self._block_size = block_size
        self.num_resets = 0
        self.reset()

    def reset(self) -> None:
        """Another epoch begins: no generation is known, and no row holds a block."""
        self.num_resets += 1  # first: another thread may be comparing generations
        self._newest = [0] * self.num_blocks
        self._num_holders = [0] * self.num_blocks
        self._blocks: list[list[int] | None] = [None] * self._num_rows  # None: the row is not in use
        self._generations: list[list[int]] = [[] for _ in range(self._num_rows)]
        self._firsts = [0] * self._num_rows  # the place of each row's first block
        self.stale: dict[int, tuple[int, int]] = {}  # row -> one block that is not its own, its generation there

    @property
    def rows(self) -> list[int]:
        """Those in use."""
        return [row for row, blocks in enumerate(self._blocks) if blocks is not None]

    def digest(self, row: int, digest: int) -> int:
        """Of what a row holds, behind the digest of what it holds in the pools before."""
        return digest_blocks(self._blocks[row] or (), self._generations[row], digest)

    def newest(self, block: int) -> int:
        return self._newest[block]

    def admit(self, row: int) -> None:
        self.release(row)
        self._blocks[row] = []

    def release(self, row: int) -> None:
        self._firsts[row] = 0
        if self._blocks[row] is None:
            return
        self._let_go(row, len(self._blocks[row] or ()))
        self._blocks[row] = None
        self.stale.pop(row, None)

    def move(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Give up the blocks that lie before the rows' windows."""
        for row, count in zip(rows, counts, strict=True):
            if count:
                self._let_go(row, count)
                self._firsts[row] += count

    def _let_go(self, row: int, count: int) -> None:
        """Of the first blocks."""
        blocks, generations = self._blocks[row] or [], self._generations[row]
        for block, generation in zip(blocks[:count], generations[:count], strict=True):
            if generation == self._newest[block]:
                self._num_holders[block] -= 1
        del blocks[:count], generations[:count]

    def append(self, rows: Sequence[int], part: StepPlan | SlidingPlan) -> None:
        generations = part.new_block_generations or [self._newest[block] for block in part.new_block_ids]
        start = 0
        for row, count in zip(rows, part.num_new_blocks, strict=True):
            if count:
                self._give(row, part.new_block_ids[start : start + count], generations[start : start + count])
                start += count

    def _give(self, row: int, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        newest, num_holders = self._newest, self._num_holders
        self._extend(row, block_ids, generations)
        for block, generation in zip(block_ids, generations, strict=True):
            if generation > newest[block]:
                if num_holders[block]:
                    self._outdate(block, generation)
                newest[block], num_holders[block] = generation, 1
            elif generation == newest[block]:
                num_holders[block] += 1
            else:
                self.stale[row] = block, generation

    def _extend(self, row: int, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        blocks = self._blocks[row]
        if blocks is None:
            self._blocks[row], self._generations[row] = list(block_ids), list(generations)
        else:
            blocks += block_ids
            self._generations[row] += generations

    def _outdate(self, block: int, generation: int) -> None:
        """Rows that hold a block in an older generation than this become stale."""
        for row, blocks in enumerate(self._blocks):
            if blocks is not None and block in blocks:
                held = self._generations[row][blocks.index(block)]  # the first is the oldest
                if held < generation:
                    self.stale.setdefault(row, (block, held))

    def num_agreeing(self, block_ids: Sequence[int], generations: Sequence[int]) -> int:
        """How many blocks, the first ones, are in these generations still."""
        pairs = enumerate(zip(block_ids, generations, strict=True))
        return next((place for place, (block, one) in pairs if self._newest[block] != one), len(block_ids))

    def claim(self, block_ids: Sequence[int], generations: Sequence[int]) -> int:
        """Blocks are filled from elsewhere in these generations: rows that hold them in an older one become stale.
        Returns how many, the first ones, were in an older generation; no other is taken."""
        for place, (block, generation) in enumerate(zip(block_ids, generations, strict=True)):
            if generation <= self._newest[block]:
                return place
            if self._num_holders[block]:
                self._outdate(block, generation)
            self._newest[block], self._num_holders[block] = generation, 0
        return len(block_ids)

    def check_copies(self, rows: Sequence[int], part: StepPlan | SlidingPlan) -> None:
        """A row that would begin with the copy of a block that it no longer holds is stale."""
        generations = part.copy_generations or [self._newest[source] for source, _ in part.block_copies]
        for (source, destination), generation in zip(part.block_copies, generations, strict=True):
            if generation < self._newest[source]:
                for row in rows:
                    if destination in (self._blocks[row] or ()):
                        self.stale[row] = source, generation

    def end_lives(self, row: int, num_computed: int, num_scheduled: int) -> list[tuple[int, int]]:
        """Of the blocks that a row was to write to and that are its own; returns them, with the generations."""
        first, end = num_computed // self._block_size, -(-(num_computed + num_scheduled) // self._block_size)
        places = slice(max(0, first - self._firsts[row]), max(0, end - self._firsts[row]))
        lives = list(zip((self._blocks[row] or [])[places], self._generations[row][places], strict=True))
        ended = [(block, generation) for block, generation in lives if generation == self._newest[block]]
        for block, generation in ended:
            self._outdate(block, generation + 1)
            self._newest[block], self._num_holders[block] = generation + 1, 0
        return ended


class BlockFence:
    """The fences of all pools of a worker: a row that is stale in one of them is not computed."""

    def __init__(self, num_rows: int, num_blocks: int, block_size: int, sliding: Sequence[int] = ()) -> None:
        """`sliding`: numbers of blocks of the sliding pools."""
        self._pools = [PoolFence(num_rows, size, block_size) for size in (num_blocks, *sliding)]

    @property
    def first(self) -> PoolFence:
        """That of the pool that no window has."""
        return self._pools[0]

    def reset(self) -> None:
        for pool in self._pools:
            pool.reset()

    def check_places(self, plan: StepPlan) -> None:
        """Raises FatalError where a plan copies what is no block."""
        for pool, part in self._parts(plan):
            if any(not 0 <= block < pool.num_blocks for pair in part.block_copies for block in pair):
                raise FatalError(f"plan copies a block outside the pool of {pool.num_blocks}: {part.block_copies}")

    def read(self, plan: StepPlan) -> list[RefusedRow]:
        """Take a plan's changes in.  Returns the entries that must not be computed, in order."""
        for pool in self._pools:
            for row in plan.released_rows:
                pool.release(row)
            for sequence in plan.admitted:
                pool.admit(sequence.row)
        for pool, moved in zip(self._pools[1:], plan.sliding, strict=False):
            pool.move(plan.rows, moved.num_left_blocks)
        for pool, part in self._parts(plan):
            if part.new_block_ids:
                pool.append(plan.rows, part)
            if part.block_copies:
                pool.check_copies(plan.rows, part)
        if not any(pool.stale for pool in self._pools):
            return []
        # One after the other: what a row leaves unwritten makes rows behind it stale.
        return [
            self.refuse(plan, entry)
            for entry, row in enumerate(plan.rows)
            if any(row in pool.stale for pool in self._pools)
        ]

    def refuse(self, plan: StepPlan, entry: int) -> RefusedRow:
        """Have an entry left out: for a stale block, or else because its row is not where the plan has it."""
        row = plan.rows[entry]
        where = next((index for index, pool in enumerate(self._pools) if row in pool.stale), -1)
        stale = self._pools[where].stale.get(row)
        computed, scheduled = plan.num_computed_tokens[entry], plan.num_scheduled_tokens[entry]
        unwritten, *sliding = (pool.end_lives(row, computed, scheduled) for pool in self._pools)
        if stale is None:
            return RefusedRow(entry, Refusal.NOT_IN_STEP, unwritten=unwritten, sliding_unwritten=sliding)
        block, generation = stale
        known = self._pools[where].newest(block)
        return RefusedRow(entry, Refusal.STALE_BLOCK, block, generation, known, unwritten, where, sliding)

    def holdings(self) -> tuple[list[int], list[int]]:
        """The rows in use, and a digest of what each holds."""
        rows, digests = self._pools[0].rows, []
        for row in rows:
            digest = 0
            for pool in self._pools:
                digest = pool.digest(row, digest)
            digests.append(digest)
        return rows, digests

    def keeps(self, plan: StepPlan, refused: Sequence[RefusedRow]) -> list[Copies]:
        """The plan's block copies in each pool, without those for the rows that were refused: into blocks that came
        with the plan."""
        return [_kept(part, refused) for _, part in self._parts(plan)]

    def _parts(self, plan: StepPlan) -> Iterator[tuple[PoolFence, StepPlan | SlidingPlan]]:
        return zip(self._pools, (plan, *plan.sliding), strict=False)


def _kept(part: StepPlan | SlidingPlan, refused: Sequence[RefusedRow]) -> Copies:
    if not refused:
        return part.block_copies
    ends = list(accumulate(part.num_new_blocks))
    parts = ((ends[one.entry] - part.num_new_blocks[one.entry], ends[one.entry]) for one in refused)
    theirs = {block for start, end in parts for block in part.new_block_ids[start:end]}
    return [copy for copy in part.block_copies if copy[1] not in theirs]
