"""Snapshots of states: which are found, which go first, and what a refused row leaves."""

from __future__ import annotations

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.clock import Clock
from services.scheduler.blocks.sliding import SlidingBlocks, longest_hit
from services.scheduler.blocks.snapshots import Snapshots

NAMES = [bytes([index]) * 16 for index in range(10)]


def snapshots_at(*places: int, size: int = 4) -> Snapshots:
    """Behind the blocks of these places."""
    held = Snapshots(size, Clock())
    held.take([NAMES[place] for place in places])
    return held


def pool_with(count: int) -> BlockPool:
    pool = BlockPool(10)
    blocks = pool.allocate(count)
    for name, block in zip(NAMES, blocks, strict=False):
        pool.register(block, name, pool.generations[block])
    return pool


def test_a_hit_ends_where_a_snapshot_was_taken() -> None:
    held, pool = snapshots_at(1, 4), pool_with(8)
    assert len(longest_hit(pool, (), NAMES, held).blocks) == 5
    assert len(longest_hit(pool, (), NAMES[:4], held).blocks) == 2
    assert len(longest_hit(pool, (), NAMES[:1], held).blocks) == 0
    assert len(longest_hit(pool_with(3), (), NAMES, held).blocks) == 2, "there are no blocks for the longer one"
    assert len(longest_hit(pool, (), NAMES, Snapshots(0, Clock())).blocks) == 0


def test_a_hit_has_its_windows_too() -> None:
    window = SlidingBlocks(window=8, size=10, block_size=8, clock=Clock())
    (block,) = window.pool.allocate(1)
    window.pool.register(block, NAMES[1], window.pool.generations[block])
    hit = longest_hit(pool_with(8), (window,), NAMES, snapshots_at(1, 4))
    assert (len(hit.blocks), hit.windows) == (2, [[block]]), "before the longer one the window is gone"
    assert len(longest_hit(pool_with(8), (window,), NAMES, snapshots_at(4)).blocks) == 0


def test_the_least_recently_used_goes_first() -> None:
    held = snapshots_at(0, 1, size=2)
    first = held.use(NAMES[0])
    (taken,) = held.take([NAMES[2]])
    assert taken is not None
    assert [held.pool.knows(name) for name in NAMES[:3]] == [True, False, True]
    assert held.use(NAMES[0]) == first, "what it stands for has not changed"
    assert held.use(NAMES[2]) == taken and taken[1] == 2, "its second life"


def test_one_plan_saves_no_snapshot_twice() -> None:
    held = snapshots_at(0, size=2)
    first, second, third, again = held.take([NAMES[1], NAMES[2], NAMES[3], NAMES[2]])
    assert first is not None and second is not None and first[0] != second[0]
    assert third is None, "all are being saved"
    assert again is None, "it is there"
    assert held.pool.num_available == 2


def test_what_was_not_saved_is_not_found() -> None:
    held = snapshots_at(3, size=1)
    snapshot, generation = held.use(NAMES[3])
    held.forget(snapshot, generation - 1)
    assert held.pool.knows(NAMES[3]), "that life was over before"
    held.forget(snapshot, generation)
    assert not held.pool.knows(NAMES[3])
    (next_life,) = held.take([NAMES[3]])
    assert next_life is not None and next_life[1] > generation
    held.forget(99, 1)
