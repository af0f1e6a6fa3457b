"""The fence against its meaning written down plainly, which looks through each life of each block of a row."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.execution.tables.block_fence import BlockFence
from shared.block_digest import digest_blocks
from shared.errors import FatalError
from shared.messages import Refusal, SlidingPlan, StepPlan
from tests.unit.worker.blocks.test_block_fence import SIZE, admission

ROWS, BLOCKS, SLIDING = 4, 7, 5

Life = tuple[int, int]  # a block and its generation
Refused = tuple[int, int, list[Life], list[list[Life]]]  # entry, pool that is stale, unwritten there and in the others


class PlainPool:
    """A row is stale once it has a block that was given anew since, or came with an old life of one."""

    def __init__(self, num_blocks: int) -> None:
        self.tables: dict[int, list[Life | None]] = {}  # by row in use; None: it has left that place
        self.newest = [0] * num_blocks
        self.stale: set[int] = set()

    def lives(self, row: int) -> list[Life]:
        return [life for life in self.tables.get(row, []) if life is not None]

    def note_stale(self) -> None:
        self.stale |= {row for row in self.tables if any(g < self.newest[block] for block, g in self.lives(row))}

    def take(self, rows: list[int], part: StepPlan | SlidingPlan) -> None:
        start = 0
        for row, count in zip(rows, part.num_new_blocks, strict=True):
            for place in range(start, start + count):
                block, generation = part.new_block_ids[place], part.new_block_generations[place]
                self.tables.setdefault(row, []).append((block, generation))
                self.newest[block] = max(self.newest[block], generation)
            start += count
        for (source, to), generation in zip(part.block_copies, part.copy_generations, strict=True):
            if generation < self.newest[source]:
                self.stale |= {row for row in rows if any(block == to for block, _ in self.lives(row))}
        self.note_stale()

    def leave(self, row: int, count: int) -> None:
        table = self.tables.setdefault(row, [])
        num_left = table.count(None) + count
        self.tables[row] = [*[None] * num_left, *table[num_left:]]

    def end(self, row: int, computed: int, scheduled: int) -> list[Life]:
        written = {position // SIZE for position in range(computed, computed + scheduled)}
        mine = [life for place, life in enumerate(self.tables.get(row, [])) if place in written and life is not None]
        ended = [(block, generation) for block, generation in mine if generation == self.newest[block]]
        for block, generation in ended:
            self.newest[block] = generation + 1
        self.note_stale()
        return ended

    def claim(self, lives: list[Life]) -> int:
        for place, (block, generation) in enumerate(lives):
            if generation <= self.newest[block]:
                return place
            self.newest[block] = generation
            self.note_stale()
        return len(lives)


class PlainFence:
    def __init__(self) -> None:
        self.pools = [PlainPool(BLOCKS), PlainPool(SLIDING)]

    def read(self, plan: StepPlan) -> list[Refused]:
        first, second = self.pools
        for pool in self.pools:
            for row in [*plan.released_rows, *(one.row for one in plan.admitted)]:
                pool.tables.pop(row, None)
                pool.stale.discard(row)
            pool.tables |= {one.row: [] for one in plan.admitted}
        for row, count in zip(plan.rows, plan.sliding[0].num_left_blocks, strict=True):
            second.leave(row, count)
        first.take(plan.rows, plan)
        second.take(plan.rows, plan.sliding[0])
        refused = []
        for entry, row in enumerate(plan.rows):
            where = next((place for place, pool in enumerate(self.pools) if row in pool.stale), None)
            if where is not None:
                one, *others = (
                    pool.end(row, plan.num_computed_tokens[entry], plan.num_scheduled_tokens[entry])
                    for pool in self.pools
                )
                refused.append((entry, where, one, others))
        return refused


def random_part(r: random.Random, rows: list[int], pool: PlainPool) -> dict[str, Any]:
    """Blocks for rows, in lives that are new, known or old, and copies into some of them."""
    num_blocks = len(pool.newest)
    given = [[r.randrange(num_blocks) for _ in range(r.choice([0, 0, 1, 2]))] for _ in rows]
    given = [list(dict.fromkeys(blocks)) for blocks in given]
    flat = [block for blocks in given for block in blocks]
    copies = [(r.randrange(num_blocks), block) for block in flat if r.random() < 0.2]
    return {
        "num_new_blocks": [len(blocks) for blocks in given],
        "new_block_ids": flat,
        "new_block_generations": [max(0, pool.newest[block] + r.choice([0, 0, 1, 1, -1])) for block in flat],
        "block_copies": copies,
        "copy_generations": [max(0, pool.newest[source] + r.choice([0, 0, -1])) for source, _ in copies],
    }


def random_plan(r: random.Random, plain: PlainFence, step_id: int) -> StepPlan:
    rows = r.sample(range(ROWS), r.randrange(1, ROWS + 1))
    first, second = (random_part(r, rows, pool) for pool in plain.pools)
    left = [r.choice([0, 0, 0, 1, 2]) for _ in rows]
    return StepPlan(
        epoch=1, step_id=step_id, admitted=[admission(row) for row in rows if r.random() < 0.3], rows=rows,
        num_computed_tokens=[r.randrange(3 * SIZE) for _ in rows],
        num_scheduled_tokens=[r.randrange(1, 2 * SIZE) for _ in rows],
        released_rows=[row for row in range(ROWS) if r.random() < 0.1],
        sliding=[SlidingPlan(left, **second)], **first,
    )  # fmt: skip


def without_copies_for(part: StepPlan | SlidingPlan, entries: list[int]) -> list[tuple[int, int]]:
    """Copies into blocks that came for other entries."""
    starts = [sum(part.num_new_blocks[:entry]) for entry in range(len(part.num_new_blocks))]
    taken = {block for one in entries for block in part.new_block_ids[starts[one] :][: part.num_new_blocks[one]]}
    return [copy for copy in part.block_copies if copy[1] not in taken]


@pytest.mark.parametrize("seed", range(30))
def test_what_is_refused_is_what_the_meaning_says(seed: int) -> None:
    r = random.Random(seed)
    fence, plain = BlockFence(ROWS, BLOCKS, SIZE, [SLIDING]), PlainFence()
    first = plain.pools[0]
    for step_id in range(40):
        plan = random_plan(r, plain, step_id)
        refused = fence.read(plan)
        expected = plain.read(plan)
        assert [(one.entry, one.pool, one.unwritten, one.sliding_unwritten) for one in refused] == expected
        for one in refused:
            assert one.reason is Refusal.STALE_BLOCK
            assert one.generation < one.known <= plain.pools[one.pool].newest[one.block_id]
        entries = [one.entry for one in refused]
        assert fence.keeps(plan, refused) == [without_copies_for(part, entries) for part in (plan, plan.sliding[0])]
        blocks = [(block, first.newest[block] + r.choice([0, 1, 1, 2])) for block in r.sample(range(BLOCKS), 2)]
        assert r.random() < 0.7 or fence.first.claim(*zip(*blocks, strict=True)) == first.claim(blocks)
        check_holdings(fence, plain)
        known = [(block, generation - (r.random() < 0.1)) for block, generation in enumerate(first.newest)]
        agreeing = [life == (place, first.newest[place]) for place, life in enumerate(known)]
        assert fence.first.num_agreeing(*zip(*known, strict=True)) == [*agreeing, False].index(False)


def check_holdings(fence: BlockFence, plain: PlainFence) -> None:
    first, second = plain.pools
    digests = []
    for row in sorted(first.tables):
        digest = 0
        for pool in (first, second):
            digest = digest_blocks([block for block, _ in pool.lives(row)], [g for _, g in pool.lives(row)], digest)
        digests.append(digest)
    assert fence.holdings() == (sorted(first.tables), digests)
    for held, pool in zip(fence._pools, plain.pools, strict=True):
        assert [held.newest(block) for block in range(held.num_blocks)] == pool.newest
        lives = [life for row in pool.tables for life in pool.lives(row)]
        assert held._num_holders == [lives.count((block, newest)) for block, newest in enumerate(pool.newest)]


def test_a_pool_that_was_emptied_is_known_by_another_number() -> None:
    fence = BlockFence(ROWS, BLOCKS, SIZE)
    before = fence.first.num_resets
    fence.reset()
    assert fence.first.num_resets != before


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_plan_copies_blocks_of_the_pool_alone(block: int) -> None:
    fence = BlockFence(ROWS, BLOCKS, SIZE, [SLIDING])

    def plan(copies: list[Life], sliding: list[Life]) -> StepPlan:
        return StepPlan(1, 0, [], [], [], [], [], [], copies, [], sliding=[SlidingPlan([], [], [], [], sliding)])

    fence.check_places(plan([(0, BLOCKS - 1), (BLOCKS - 1, 0)], [(0, SLIDING - 1)]))
    for copy in ((block, 1), (1, block)):
        with pytest.raises(FatalError, match=f"outside the pool of {BLOCKS}"):
            fence.check_places(plan([(0, 1), copy], []))
        with pytest.raises(FatalError, match=f"outside the pool of {SLIDING}"):
            fence.check_places(plan([], [copy]))


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
