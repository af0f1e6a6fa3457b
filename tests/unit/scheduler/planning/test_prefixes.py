"""What a step computes for one sequence is not computed for another, and a step that is over is forgotten."""

from __future__ import annotations

import pytest

from services.scheduler.state.policy import Policy
from tests.unit.scheduler.worlds.world import World

SIZE = 8
PROMPT = [(7 * i) % 50 for i in range(2 * SIZE)]


def test_the_two_tokens_that_fill_a_block_are_waited_for() -> None:
    """The first has computed 14 of its 16 tokens; the second, which shares them, begins behind the sixteenth."""
    world = World(Policy(max_num_batched_tokens=7), block_size=SIZE)
    world.add("first", PROMPT)
    for _ in range(2):
        world.plan("w0")
        world.answer("w0")
    world.add("second", [*PROMPT, 1, 2, 3])
    world.run()
    world.assert_outputs()
    assert world.scheduler.counters.num_prefix_cache_hits == 2 * SIZE


def test_a_step_that_is_over_marks_no_snapshot() -> None:
    world = World(Policy(max_num_batched_tokens=64), block_size=SIZE, num_snapshots=4)
    world.add("a", PROMPT * 4)
    assert world.plan("w0") is not None
    batcher = world.scheduler._batchers["w0"]
    assert not batcher._prefixes._marks, "else each sequence that had a mark would be kept for ever"
    world.run()
    assert sum(len(plan.state_saves) for plan in world.trace) == 1


@pytest.mark.parametrize(("retention", "num_hits"), [(600.0, 2 * SIZE), (0.0, 0)])
def test_a_prompt_that_is_to_be_kept_outlives_others(retention: float, num_hits: int) -> None:
    """Of its three blocks those that the others, who fill a pool of ten, do not need: its tail goes first."""
    world = World(Policy(max_num_batched_tokens=64), block_size=SIZE, num_blocks=10)
    kept = [(11 * i) % 50 for i in range(3 * SIZE + 1)]
    world.add("kept", kept, tenant="a", retention=retention)
    world.run()
    for number in range(6):
        world.add(f"other{number}", [(number + 13 * i) % 50 for i in range(20)], tenant="b")
    world.run()
    before = world.scheduler.counters.num_prefix_cache_hits
    world.add("again", kept, tenant="a")
    world.run()
    world.assert_outputs()
    assert world.scheduler.counters.num_prefix_cache_hits - before == num_hits
