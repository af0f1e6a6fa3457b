"""What fits into a step: rows, tokens and blocks, and for how many that wait something is fetched."""

from __future__ import annotations

import pytest

from services.scheduler.planning.prefixes import MAX_PREFETCHED
from services.scheduler.state.policy import Policy
from services.scheduler.state.sequence import Sequence
from shared.messages import FetchBlocks, StoreContents
from shared.requests.beam import Beam
from tests.unit.scheduler.worlds.beam_world import BeamWorld
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.moving_world import SPACES
from tests.unit.scheduler.worlds.world import World

SIZE = 8


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 3 * i) % 50 for i in range(length)]


def only(world: World, request_id: str) -> Sequence:
    (sequence,) = world.scheduler.requests[request_id].sequences
    return sequence


def test_a_step_has_a_token_for_each_row_up_to_its_budget() -> None:
    world = World(Policy(max_num_batched_tokens=3), max_num_seqs=3)
    for index in range(3):
        world.add(f"r{index}", prompt(1, index), max_tokens=6)
    world.run()
    world.assert_outputs()
    assert [len(plan.rows) for plan in world.trace] == [3] * 6


def test_what_starts_before_another_takes_blocks_of_each_pool() -> None:
    world = World(Policy(max_num_batched_tokens=64), block_size=SIZE, num_blocks=40, sliding=((16, 30),))
    for index, length in enumerate((20, 12, 60)):
        world.add(f"r{index}", prompt(length, index))
    first, short, long = (only(world, f"r{index}") for index in range(3))
    budget, (window,) = world.scheduler._batchers["w0"]._block_budget, world.scheduler.replicas["w0"].sliding
    alone, behind = budget.num_lacking(first, []), budget.num_lacking(first, [short, long])
    assert [b - a for a, b in zip(alone, behind, strict=True)] == [2 + 8, 2 + window.most_blocks(SIZE)]


@pytest.mark.parametrize("num_before", [MAX_PREFETCHED - 1, MAX_PREFETCHED])
def test_blocks_are_fetched_for_the_first_that_wait(num_before: int) -> None:
    world = World(Policy(max_num_batched_tokens=64), workers=0)
    world.join("w0", capacity(max_num_seqs=1, block_space=SPACES[SIZE]))
    world.scheduler.moves.join("s")
    world.add("running", prompt(4), max_tokens=40)
    world.step()
    for index in range(num_before):
        world.add(f"r{index}", prompt(60, 1 + index))
    world.add("stored", prompt(60, 40))
    names = only(world, "stored").hash_blocks(SIZE)
    world.scheduler.moves.take_orders()
    world.scheduler.moves.told(StoreContents("s", [SPACES[SIZE] + name for name in names], []))
    world.plan("w0")
    fetches = [order for _, order in world.scheduler.moves.take_orders() if isinstance(order, FetchBlocks)]
    assert bool(fetches) is (num_before < MAX_PREFETCHED)


def test_beams_of_a_search_begin_behind_each_other_while_the_background_rests() -> None:
    num_copies = []
    for has_background in (False, True):
        world = BeamWorld(block_size=SIZE)
        if has_background:
            world.add("batch", prompt(5), is_background=True, max_tokens=60)
            for _ in range(4):
                world.step()
        world.add_beam("live", prompt(19, 1), Beam(4), max_tokens=8)
        while ("live", 0) not in world.finished:
            world.step()
        num_copies.append(world.scheduler.counters.num_block_copies)
        world.assert_outputs("live")
    assert num_copies[0] == num_copies[1] > 3


def test_of_several_samples_the_first_has_the_prompt_s_log_probabilities() -> None:
    world = World()
    world.add("r", prompt(5), n=2, prompt_logprobs=3)
    plan = world.plan("w0")
    assert plan is not None
    found = [one.params.prompt_logprobs for one in plan.admitted]
    while len(found) < 2:
        world.answer("w0")
        plan = world.plan("w0")
        assert plan is not None
        found += [one.params.prompt_logprobs for one in plan.admitted]
    assert found == [3, None]
