"""Tokens that a client reads together at their end are sent on in groups."""

from __future__ import annotations

import pytest

from services.scheduler.lifecycle.outputs import GATHER_SECONDS
from shared.messages import AttachRequest, FinishReason, StreamLost
from tests.unit.scheduler.worlds.world import World

PROMPT = [3, 1, 4, 1, 5]


def sent(world: World, seconds: float) -> list[int]:
    """How many tokens have been sent on after each step, which takes so long."""
    found = []
    while world.plan("w0") or world.plans["w0"]:
        world.now += seconds - 0.01  # an answer takes that much in this world
        world.answer("w0")
        found.append(len(world.outputs.get(("r", 0), [])))
    return found


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        (GATHER_SECONDS / 3, [1, 1, 1, 4, 4, 4, 7, 7, 7, 10]),
        (GATHER_SECONDS, list(range(1, 11))),
        (GATHER_SECONDS / 100, [1] * 9 + [10]),
    ],
)
def test_the_first_is_sent_at_once_and_others_after_a_while_and_all_at_the_end(
    seconds: float, wanted: list[int]
) -> None:
    world = World()
    world.now = 50.0
    world.add("r", PROMPT, max_tokens=10, is_gathered=True)
    assert sent(world, seconds + 1e-9)[: len(wanted)] == wanted
    world.assert_outputs("r")
    assert not world.scheduler.outbound._sent_at, "what has ended is forgotten"


def test_a_stop_string_is_looked_for_in_every_token() -> None:
    world = World()
    world.add("r", PROMPT, max_tokens=6, is_gathered=True, stop=["x"])
    assert sent(world, 0.02) == [1, 2, 3, 4, 5, 6]


def test_a_detokenizer_that_has_lost_the_stream_gets_all_there_is() -> None:
    world = World()
    world.add("r", PROMPT, max_tokens=20, is_gathered=True)
    for _ in range(6):
        world.step()
    assert len(world.outputs["r", 0]) == 1
    world.scheduler.stream_lost(StreamLost("r", 0))
    world.gather()
    assert len(world.outputs["r", 0]) == len(world.scheduler.requests["r"].sequences[0].token_ids) - len(PROMPT) > 3
    world.run()
    world.assert_outputs("r")


def test_a_call_that_comes_back_gets_each_token_as_it_comes() -> None:
    world = World()
    world.add("r", PROMPT, max_tokens=20, is_gathered=True)
    for _ in range(6):
        world.step()
    world.scheduler.attach(AttachRequest("r", "g0"))
    numbers = []
    for _ in range(4):
        world.step()
        numbers.append(len(world.outputs["r", 0]))
    assert numbers == list(range(numbers[0], numbers[0] + 4))


def test_others_are_sent_on_as_they_come_beside_one_that_is_gathered() -> None:
    world = World()
    world.add("r", PROMPT, max_tokens=9, is_gathered=True)
    world.add("s", PROMPT[::-1], max_tokens=9)
    for _ in range(6):
        world.step()
    assert len(world.outputs["r", 0]) == 1 and len(world.outputs["s", 0]) > 3
    world.run()
    world.assert_outputs()
    assert set(world.finished.values()) == {FinishReason.LENGTH}
