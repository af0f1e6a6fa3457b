"""A worker whose successor is smaller: a request keeps its limits, and one without room does not hinder others."""

from __future__ import annotations

import pytest

from shared.errors import RejectCode
from shared.messages import WorkerCapacity
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.world import World

SMALL = capacity(num_blocks=8, block_size=8, max_model_len=64)


def moved_to_a_smaller_worker() -> World:
    """One that needs 112 tokens, and one that needs 7, at a worker of 64."""
    world = World(num_blocks=64, block_size=8, max_model_len=128)
    world.add("large", list(range(40)) * 2, max_tokens=32)
    world.add("small", [1, 2, 3], max_tokens=4)
    world.step()
    world.step()
    world.lose("w0")
    world.join("w1", SMALL)
    return world


def test_who_finds_no_room_does_not_hold_up_the_others() -> None:
    world = moved_to_a_smaller_worker()
    world.add("later", [4, 5, 6], max_tokens=4)
    world.run()
    world.assert_outputs("small", "later")
    assert ("large", 0) not in world.finished and [s.request.request_id for s in world.scheduler.unassigned] == [
        "large"
    ]


def test_it_goes_on_where_there_is_room_again() -> None:
    world = moved_to_a_smaller_worker()
    world.run()
    world.join("w2")
    world.run()
    world.assert_outputs("large", "small")
    world.assert_idle()


def test_it_ends_with_a_status_where_there_is_none_for_long() -> None:
    world = moved_to_a_smaller_worker()
    world.run()
    patience = world.scheduler.policy.resume_timeout
    assert world.scheduler.expire(100.0) == world.scheduler.expire(100.0 + patience) == []
    assert world.scheduler.expire(101.0 + patience) == ["large"]
    world.after()
    assert world.rejected == {"large": RejectCode.UNAVAILABLE}
    world.assert_idle()


def test_while_no_worker_is_here_nobody_knows_how_large_the_next_one_is() -> None:
    world = moved_to_a_smaller_worker()
    world.scheduler.expire(100.0)
    world.lose("w1")
    assert world.scheduler.expire(1000.0) == []
    world.join("w2", SMALL)
    assert world.scheduler.expire(2000.0) == []
    world.join("w3")
    world.run()
    world.assert_outputs("large", "small")


def test_a_smaller_worker_beside_it_cuts_nobody_short() -> None:
    world = World(num_blocks=64, block_size=8, max_model_len=128)
    world.add("large", list(range(40)) * 2, max_tokens=32)
    world.step()
    world.join("w1", SMALL)
    assert world.scheduler.intake.max_model_len == 64
    world.run()
    world.assert_outputs("large")


def test_the_smallest_worker_is_the_one_that_holds_the_fewest_tokens() -> None:
    world = World(num_blocks=20, block_size=32, max_model_len=128)
    world.join("w1", capacity(num_blocks=40, block_size=8, max_model_len=96))
    assert world.scheduler.intake.capacity is not None and world.scheduler.intake.capacity.num_blocks == 40
    world.join("w2", capacity(num_blocks=50, block_size=32, max_model_len=80))
    assert world.scheduler.intake.capacity.num_blocks == 40 and world.scheduler.intake.max_model_len == 80


@pytest.mark.parametrize(
    ("size", "has_room"),
    [
        (capacity(num_blocks=8, block_size=8, max_model_len=64), True),
        (capacity(num_blocks=7, block_size=8, max_model_len=64), False),
        (capacity(num_blocks=64, block_size=8, max_model_len=56), False),
        (capacity(num_blocks=4, block_size=16, max_model_len=60), True),
    ],
)
def test_a_sequence_is_placed_where_both_its_length_and_its_blocks_fit(size: WorkerCapacity, has_room: bool) -> None:
    world = World(num_blocks=64, block_size=8, max_model_len=128)
    world.add("r", list(range(50)), max_tokens=10)
    world.lose("w0")
    world.join("w1", size)
    assert bool(world.scheduler.unassigned) is not has_room
    world.join("w2")
    world.run()
    world.assert_outputs("r")
