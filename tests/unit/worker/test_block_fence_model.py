"""The fence against its meaning written down plainly, which looks through each life of each block of a row."""

from __future__ import annotations

import random

import pytest

from engine.execution.block_fence import BlockFence
from shared.block_digest import digest_blocks
from shared.messages import Refusal, StepPlan
from tests.unit.worker.test_block_fence import SIZE, admission

ROWS, BLOCKS = 4, 7

Refused = tuple[int, list[tuple[int, int]]]  # an entry, and the blocks that it leaves unwritten


class PlainFence:
    """A row is stale while it has a block that was given anew since, or came with an old life of one."""

    def __init__(self) -> None:
        self.lives: dict[int, list[tuple[int, int]]] = {}  # by row in use
        self.newest = [0] * BLOCKS
        self.stale: set[int] = set()  # beside those whose lives say so: they would have begun with a stale copy

    def is_stale(self, row: int) -> bool:
        return row in self.stale or any(generation < self.newest[b] for b, generation in self.lives.get(row, []))

    def read(self, plan: StepPlan) -> list[Refused]:
        for row in [*plan.released_rows, *(one.row for one in plan.admitted)]:
            self.lives.pop(row, None)
            self.stale.discard(row)
        self.lives |= {one.row: [] for one in plan.admitted}
        start = 0
        for row, count in zip(plan.rows, plan.num_new_blocks, strict=True):
            for place in range(start, start + count):
                block, generation = plan.new_block_ids[place], plan.new_block_generations[place]
                self.lives.setdefault(row, []).append((block, generation))
                self.newest[block] = max(self.newest[block], generation)
            start += count
        for (source, to), generation in zip(plan.block_copies, plan.copy_generations, strict=True):
            if generation < self.newest[source]:
                self.stale |= {row for row in plan.rows if any(block == to for block, _ in self.lives.get(row, []))}
        refused = []
        for entry, row in enumerate(plan.rows):
            if self.is_stale(row):
                refused.append(
                    (entry, self.end(row, plan.num_computed_tokens[entry], plan.num_scheduled_tokens[entry]))
                )
        return refused

    def end(self, row: int, computed: int, scheduled: int) -> list[tuple[int, int]]:
        written = {position // SIZE for position in range(computed, computed + scheduled)}
        mine = [life for place, life in enumerate(self.lives.get(row, [])) if place in written]
        ended = [(block, generation) for block, generation in mine if generation == self.newest[block]]
        for block, generation in ended:
            self.newest[block] = generation + 1
        return ended


def random_plan(r: random.Random, plain: PlainFence, step_id: int) -> StepPlan:
    rows = r.sample(range(ROWS), r.randrange(1, ROWS + 1))
    given = [[r.randrange(BLOCKS) for _ in range(r.choice([0, 0, 1, 2]))] for _ in rows]
    given = [list(dict.fromkeys(blocks)) for blocks in given]
    flat = [block for blocks in given for block in blocks]
    generations = [max(0, plain.newest[block] + r.choice([0, 0, 1, 1, -1])) for block in flat]
    copies = [(r.randrange(BLOCKS), block) for block in flat if r.random() < 0.2]
    return StepPlan(
        1, step_id, [admission(row) for row in rows if r.random() < 0.3], rows,
        [r.randrange(2 * SIZE) for _ in rows], [r.randrange(1, 2 * SIZE) for _ in rows],
        [len(blocks) for blocks in given], flat, copies, [row for row in range(ROWS) if r.random() < 0.1],
        new_block_generations=generations,
        copy_generations=[max(0, plain.newest[source] + r.choice([0, 0, -1])) for source, _ in copies],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_what_is_refused_is_what_the_meaning_says(seed: int) -> None:
    r = random.Random(seed)
    fence, plain = BlockFence(ROWS, BLOCKS, SIZE), PlainFence()
    for step_id in range(40):
        plan = random_plan(r, plain, step_id)
        refused = fence.read(plan)
        expected = plain.read(plan)
        assert [(one.entry, one.unwritten) for one in refused] == expected
        for one in refused:
            assert one.reason is Refusal.STALE_BLOCK
            assert one.generation < one.known <= plain.newest[one.block_id]
        starts = [sum(plan.num_new_blocks[:entry]) for entry in range(len(plan.rows))]
        taken = {
            block for one in refused
            for block in plan.new_block_ids[starts[one.entry] :][: plan.num_new_blocks[one.entry]]
        }  # fmt: skip
        assert fence.keeps(plan, refused) == [[copy for copy in plan.block_copies if copy[1] not in taken]]
        held = [digest_blocks([b for b, _ in lives], [g for _, g in lives]) for _, lives in sorted(plain.lives.items())]
        assert fence.holdings() == (sorted(plain.lives), held)


def test_a_row_that_is_not_where_the_plan_has_it_leaves_its_blocks_unwritten() -> None:
    fence, lives = BlockFence(ROWS, BLOCKS, SIZE), [1] * 3
    plan = StepPlan(1, 0, [admission(0)], [0], [SIZE], [SIZE + 1], [3], [4, 5, 6], [], [], new_block_generations=lives)
    assert fence.read(plan) == []
    one = fence.refuse(plan, 0)
    assert (one.entry, one.reason, one.block_id, one.unwritten) == (0, Refusal.NOT_IN_STEP, -1, [(5, 1), (6, 1)])


def test_a_plan_without_generations_gives_blocks_as_they_are() -> None:
    fence = BlockFence(ROWS, BLOCKS, SIZE)
    first = StepPlan(1, 0, [admission(0)], [0], [0], [SIZE], [1], [4], [], [], new_block_generations=[3])
    assert fence.read(first) == []
    plain = StepPlan(1, 1, [admission(1)], [1], [0], [SIZE], [2], [4, 5], [(4, 5)], [])
    assert fence.read(plain) == [] and fence.holdings()[1][1] == digest_blocks([4, 5], [3, 0])
