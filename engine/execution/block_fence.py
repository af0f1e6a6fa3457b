"""Keeps a row from blocks that now belong to another row: the worker's side of the generations of blocks.

The scheduler numbers the generations of every block, and sends the generation with each block that it gives to a row.
A row that was given an older generation no longer holds the block, whatever the scheduler assumes: the row is stale
until it is released or admitted again.  A step that gives no row a block costs nothing here.

Blocks that a refused row was to fill stay unwritten, though the scheduler may have given them to other rows as a prefix
already: their generation ends with the refusal, and rows that share them are stale too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shared.block_digest import digest_blocks
from shared.messages.steps import Refusal, RefusedRow, StepPlan


class BlockFence:
    """The blocks of each row, and their generations.

    Invariant: `_num_holders[b]` rows have block b in its newest known generation, `_newest[b]`.
    """

    def __init__(self, num_rows: int, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._newest = [0] * num_blocks
        self._num_holders = [0] * num_blocks
        self._blocks: list[list[int] | None] = [None] * num_rows  # None: the row is not in use
        self._generations: list[list[int]] = [[] for _ in range(num_rows)]
        self._stale: dict[int, tuple[int, int]] = {}  # row -> one block that is not its own, its generation there

    def reset(self) -> None:
        """Another epoch begins: no generation is known, and no row holds a block."""
        self._newest = [0] * len(self._newest)
        self._num_holders = [0] * len(self._num_holders)
        self._blocks = [None] * len(self._blocks)
        self._generations = [[] for _ in self._generations]
        self._stale.clear()

    def read(self, plan: StepPlan) -> list[RefusedRow]:
        """Take a plan's changes in.  Returns the entries that must not be computed, in order."""
        for row in plan.released_rows:
            self._release(row)
        for sequence in plan.admitted:
            self._release(sequence.row)
            self._blocks[sequence.row], self._generations[sequence.row] = [], []
        if plan.new_block_ids:
            self._append(plan)
        if plan.block_copies:
            self._check_copies(plan)
        if not self._stale:
            return []
        return [self.refuse(plan, entry) for entry, row in enumerate(plan.rows) if row in self._stale]

    def refuse(self, plan: StepPlan, entry: int) -> RefusedRow:
        """Have an entry left out: for a stale block, or else because its row is not where the plan has it."""
        row = plan.rows[entry]
        stale = self._stale.get(row)
        unwritten = self._end_lives(row, plan.num_computed_tokens[entry], plan.num_scheduled_tokens[entry])
        if stale is None:
            return RefusedRow(entry, Refusal.NOT_IN_STEP, unwritten=unwritten)
        block, generation = stale
        return RefusedRow(entry, Refusal.STALE_BLOCK, block, generation, self._newest[block], unwritten)

    def holdings(self) -> tuple[list[int], list[int]]:
        """The rows in use, and a digest of what each holds."""
        rows = [row for row, blocks in enumerate(self._blocks) if blocks is not None]
        return rows, [digest_blocks(self._blocks[row] or (), self._generations[row]) for row in rows]

    def _append(self, plan: StepPlan) -> None:
        generations = plan.new_block_generations or [self._newest[block] for block in plan.new_block_ids]
        start = 0
        for row, count in zip(plan.rows, plan.num_new_blocks, strict=True):
            if count:
                self._give(row, plan.new_block_ids[start : start + count], generations[start : start + count])
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
                self._stale[row] = block, generation

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
                    self._stale.setdefault(row, (block, held))

    def _check_copies(self, plan: StepPlan) -> None:
        """A row that would begin with the copy of a block that it no longer holds is stale."""
        generations = plan.copy_generations or [self._newest[source] for source, _ in plan.block_copies]
        for (source, destination), generation in zip(plan.block_copies, generations, strict=True):
            if generation < self._newest[source]:
                for row in plan.rows:
                    if destination in (self._blocks[row] or ()):
                        self._stale[row] = source, generation

    def keeps(self, plan: StepPlan, refused: Sequence[RefusedRow]) -> list[tuple[int, int]]:
        """The plan's block copies without those for the rows that were refused: into blocks that came with the plan."""
        ends = list(accumulate(plan.num_new_blocks))
        parts = ((ends[one.entry] - plan.num_new_blocks[one.entry], ends[one.entry]) for one in refused)
        theirs = {block for start, end in parts for block in plan.new_block_ids[start:end]}
        return [copy for copy in plan.block_copies if copy[1] not in theirs]

    def _release(self, row: int) -> None:
        blocks = self._blocks[row]
        if blocks is None:
            return
        for block, generation in zip(blocks, self._generations[row], strict=True):
            if generation == self._newest[block]:
                self._num_holders[block] -= 1
        self._blocks[row], self._generations[row] = None, []
        self._stale.pop(row, None)

    def _end_lives(self, row: int, num_computed: int, num_scheduled: int) -> list[tuple[int, int]]:
        """Of the blocks that a row was to write to and that are its own; returns them, with the generations."""
        places = slice(num_computed // self._block_size, -(-(num_computed + num_scheduled) // self._block_size))
        lives = list(zip((self._blocks[row] or [])[places], self._generations[row][places], strict=True))
        ended = [(block, generation) for block, generation in lives if generation == self._newest[block]]
        for block, generation in ended:
            self._outdate(block, generation + 1)
            self._newest[block], self._num_holders[block] = generation + 1, 0
        return ended
