"""Blocks of layers that see a window: what a sequence holds of them, what is found again, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.clock import Clock
from services.scheduler.blocks.sliding import SlidingBlocks, SlidingTable, longest_hit
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import MAX_PREEMPTIONS, Sequence
from shared.requests.beam import Beam
from tests.unit.scheduler.worlds.beam_world import BeamWorld
from tests.unit.scheduler.worlds.world import World

SIZE = 8
NAMES = [bytes([index]) * 16 for index in range(10)]


def blocks_of(window: int, size: int = 20) -> SlidingBlocks:
    return SlidingBlocks(window, size, SIZE, Clock())


def name(pool: BlockPool, places: Iterator[int] | range) -> None:
    """Give blocks the names of these places, held by no sequence."""
    for place in places:
        (block,) = pool.allocate(1)
        pool.register(block, NAMES[place], pool.generations[block])
        pool.release([block])


def test_places_before_the_window_are_given_back() -> None:
    blocks, table = blocks_of(window=16), SlidingTable()
    blocks.grow(table, 5)
    held = list(table.block_ids)
    assert [blocks.first_place(length) for length in (0, 16, 23, 24, 40)] == [0, 0, 0, 1, 3]
    blocks.slide(table, 33)
    assert (table.first, table.end, table.block_ids) == (2, 5, held[2:])
    assert blocks.pool.num_held == 3
    blocks.slide(table, 20)
    assert table.first == 2, "a window does not come back"


def test_the_window_sees_no_token_that_was_given_back() -> None:
    """One token behind the last computed one may be computed again: that is the one that sees furthest back."""
    for window in range(1, 40):
        for length in range(1, 90):
            assert blocks_of(window).first_place(length) * SIZE <= max(0, (length - 1) - window + 1)


@pytest.mark.parametrize(
    ("missing", "length"),
    [((), 8), ((0, 1, 2, 3, 4, 5), 8), ((7,), 7), ((6,), 6), ((5, 7), 5), ((0, 2, 4, 6), 0)],
)
def test_a_hit_is_the_longest_prefix_that_every_pool_can_supply(missing: tuple[int, ...], length: int) -> None:
    full, window = BlockPool(20), blocks_of(window=16)  # two blocks before the end of a prefix
    name(full, range(8))
    name(window.pool, (place for place in range(8) if place not in missing))
    hit = longest_hit(full, [window], NAMES)
    assert len(hit.blocks) == length
    assert len(hit.windows[0]) == min(2, length)


def test_of_two_windows_both_count() -> None:
    full, near, far = BlockPool(20), blocks_of(window=8), blocks_of(window=32)
    name(full, range(9))
    name(near.pool, range(9))
    name(far.pool, (place for place in range(9) if place != 5))
    hit = longest_hit(full, [near, far], NAMES)
    assert [len(hit.blocks), *map(len, hit.windows)] == [5, 1, 4]
    assert longest_hit(full, [], NAMES).blocks == full.lookup(NAMES)


def sequence_of(world: World) -> Sequence:
    (sequence,) = replica_of(world).running
    return sequence


def replica_of(world: World) -> Replica:
    return world.scheduler.replicas["w0"]


def test_a_sequence_holds_its_window_and_a_chunk_at_most() -> None:
    world = World(Policy(max_num_batched_tokens=32), num_blocks=40, max_model_len=256, sliding=((16, 20),))
    world.add("long", list(range(40)) * 4, max_tokens=60)
    most = 0
    while world.step():
        if replica_of(world).running:
            sequence = sequence_of(world)
            chunk = 0 if sequence.num_output_tokens > SIZE else 32
            most = max(most, len(sequence.block_ids))
            assert len(sequence.sliding[0].block_ids) <= -(-(16 + chunk) // SIZE) + 1
    assert most == 28, "of the layers that see everything it held all"
    world.assert_outputs("long")
    world.assert_idle()


def test_more_sequences_fit_than_with_one_pool() -> None:
    """In the bytes of 60 blocks of a full and a sliding layer."""
    running = []
    for limits in ({"num_blocks": 60}, {"num_blocks": 100, "sliding": ((16, 20),)}):
        world = World(Policy(max_num_batched_tokens=64), max_model_len=256, **limits)
        for index in range(6):
            world.add(f"r{index}", [index] * 100, max_tokens=30)
        most = 0
        while world.step():
            most = max(most, len(replica_of(world).running))
        world.assert_outputs()
        running.append(most)
    assert running == [4, 5]


def test_what_was_given_back_is_found_until_it_is_evicted() -> None:
    world = World(Policy(max_num_batched_tokens=256), num_blocks=60, max_model_len=256, sliding=((16, 60),))
    prompt = [7 * index % 50 for index in range(64)]
    world.add("first", prompt, max_tokens=40)
    world.run()
    world.add("again", [*prompt, 3, 4, 5], max_tokens=40)
    world.run()
    assert world.scheduler.counters.num_prefix_cache_hits == 64
    window = replica_of(world).sliding[0].pool
    for block in range(window.size):
        window.distrust(block, window.generations[block])
    world.add("evicted", [*prompt, 6, 7], max_tokens=40)
    world.run()
    assert world.scheduler.counters.num_prefix_cache_hits == 64, "the window is not there, so nothing is"
    world.assert_outputs()


@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_chunk_is_no_longer_than_the_pool_allows(is_chunked: bool) -> None:
    policy = Policy(max_num_batched_tokens=128, enable_chunked_prefill=is_chunked)
    world = World(policy, num_blocks=40, max_model_len=128, sliding=((16, 5),))
    world.add("long", list(range(50)) * 2, max_tokens=20)
    world.run()
    assert max(world.workers["w0"].step_tokens) == 16
    world.assert_outputs("long")


def test_siblings_that_start_late_do_not_share_a_window_that_moved_on() -> None:
    """The first has gone on meanwhile: they take what the cache has, or compute the prompt again."""
    world = World(Policy(max_num_batched_tokens=64), num_blocks=60, max_num_seqs=2, sliding=((8, 30),))
    world.add("alone", [1] * 10, max_tokens=30)
    world.add("many", [5, 6, 7] * 9, n=3, max_tokens=50)
    world.run()
    world.assert_outputs()
    assert world.scheduler.counters.num_block_copies < 2
    world.assert_idle()


@pytest.mark.parametrize(("length", "window"), [(22, 5), (23, 6), (30, 16), (20, 40)])
def test_siblings_begin_on_the_prompt_of_the_first_as_long_as_it_has_their_windows(length: int, window: int) -> None:
    """One token is computed for each, also where the window begins exactly with a block."""
    world = World(Policy(max_num_batched_tokens=64), sliding=((window, 30),))
    world.add("r", [place % 50 for place in range(length)], n=3, max_tokens=4)
    world.plan("w0")
    plan = world.plan("w0")
    assert plan is not None
    assert plan.num_computed_tokens == [length, length - 1, length - 1] and plan.num_scheduled_tokens == [1, 1, 1]
    assert world.scheduler.counters.num_block_copies == 2
    world.run()
    world.assert_outputs()
    world.assert_idle()


@pytest.mark.parametrize("num_blocks", [16, 60])
def test_beams_share_and_copy_in_each_pool(num_blocks: int) -> None:
    """Without, and with preemptions in between."""
    world = BeamWorld(Policy(max_num_batched_tokens=40), num_blocks=num_blocks, sliding=((12, num_blocks),))
    for index in range(3):
        world.add_beam(f"r{index}", [index, 5, 6, 7] * 9, Beam(4), n=2, max_tokens=30)
    world.run()
    world.assert_outputs()
    world.assert_idle()
    assert world.scheduler.counters.num_block_copies > 10
    assert (world.scheduler.counters.num_preemptions > 0) is (num_blocks == 16)


@pytest.mark.parametrize(("num_blocks", "together"), [(12, 1), (21, 1), (22, 2)])
def test_protected_sequences_run_together_where_all_they_can_hold_fits(num_blocks: int, together: int) -> None:
    """Of its window and a step of 64 tokens that is 11 blocks each."""
    policy = Policy(max_num_batched_tokens=64)
    world = World(policy, num_blocks=60, max_model_len=128, sliding=((16, num_blocks),))
    for index in range(2):
        world.add(f"r{index}", [index] * 30, max_tokens=90)
    for sequence in replica_of(world).waiting:
        sequence.num_preemptions = MAX_PREEMPTIONS
    most = 0
    while world.step():
        most = max(most, len(replica_of(world).running))
    assert most == together
    world.assert_outputs()


def test_a_protected_sequence_takes_blocks_of_more_urgent_ones() -> None:
    """Its window gives blocks up that others still hold: then none is free for it, and no less urgent one runs."""
    chance = random.Random(74)
    window = chance.choice([16, 32, 48])
    policy = Policy(max_num_batched_tokens=chance.choice([16, 64]))
    num_blocks = chance.choice([18, 22, 28, 60])
    sliding = ((window, window // SIZE + chance.choice([2, 3, 5, 8])),)
    world = World(policy, num_blocks=num_blocks, max_num_seqs=8, sliding=sliding)
    prompt = [chance.randrange(50) for _ in range(48)]
    for index in range(10):
        shared = prompt[: chance.choice([8, 24, 48])]
        world.add(f"r{index}", shared + [index] * chance.randrange(1, 20), max_tokens=chance.randrange(10, 60))
    protected = 0
    while world.step():
        replica = replica_of(world)
        assert all(one.num_preemptions <= MAX_PREEMPTIONS for one in (*replica.running, *replica.waiting))
        protected += any(one.is_protected for one in replica.running)
    assert protected
    world.assert_outputs()
    world.assert_idle()
