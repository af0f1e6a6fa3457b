"""Workers that draft for themselves: what they are asked for, what is verified, and that no token is another for it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from services.scheduler.state.policy import Policy
from shared.messages import StepPlan
from tests.unit.scheduler.speculation.test_speculation import Storm
from tests.unit.scheduler.worlds.fake_draft import FakeDraft
from tests.unit.scheduler.worlds.fake_worker import capacity, drafts_of
from tests.unit.scheduler.worlds.world import World

EVENTS = int(os.environ.get("PAGEANT_TEST_EVENTS", "100000")) // 25


def heads(num_draft_tokens: int = 3, max_head_drafts: int = 4, **limits: Any) -> World:
    policy = Policy(max_num_batched_tokens=64, num_draft_tokens=num_draft_tokens)
    return World(policy, max_head_drafts=max_head_drafts, **limits)


def plan(world: World) -> StepPlan:
    found = world.plan("w0")
    assert found is not None
    return found


def test_a_head_s_drafts_are_verified_by_the_next_step() -> None:
    world = heads()
    world.add("r", [1, 2, 3], max_tokens=20)
    assert plan(world).num_wanted_drafts == [], "before it runs nothing is chosen"
    world.answer("w0")
    assert plan(world).num_wanted_drafts == [3]
    world.answer("w0")
    third = plan(world)
    assert third.num_draft_tokens == [3] and third.num_scheduled_tokens == [4] and third.num_wanted_drafts == [3]
    assert world.plan("w0") is None, "which drafts come next depends on what is accepted"
    world.run()
    world.assert_outputs("r")
    world.assert_idle()
    counters = world.scheduler.counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert len(world.trace) + counters.num_accepted_tokens == 20, "each step yields a token and those that are accepted"


@pytest.mark.parametrize(("fixed", "most", "count"), [(3, 4, 3), (4, 2, 2), (1, 4, 1)])
def test_no_more_is_asked_for_than_is_set_and_the_head_makes(fixed: int, most: int, count: int) -> None:
    world = heads(fixed, most)
    world.add("r", [1, 2, 3], max_tokens=30)
    world.run()
    wanted = [one for step in world.trace for one in step.num_wanted_drafts]
    assert max(wanted) == count
    world.assert_outputs("r")


def test_nothing_is_drafted_behind_a_part_of_a_prompt_and_where_nothing_can_follow() -> None:
    world = heads()
    world.add("long", list(range(40)) * 2, max_tokens=9)
    world.add("short", [1, 2, 3], max_tokens=2)
    world.add("plain", [4, 5, 6], max_tokens=9, speculate=False)
    for num_scheduled, num_wanted in (([64], []), ([16, 3, 3], [3, 0, 0])):
        step = plan(world)
        assert (step.num_scheduled_tokens, step.num_wanted_drafts) == (num_scheduled, num_wanted)
        world.answer("w0")
    world.run()
    world.assert_outputs()
    assert [len(drafts) for step in world.trace for drafts in drafts_of(step) if drafts]


def test_as_many_drafts_as_tokens_can_still_come() -> None:
    for max_tokens in range(1, 7):
        world = heads(4)
        world.add("r", [1, 2, 3], max_tokens=max_tokens)
        plan(world)
        world.answer("w0")
        second = world.plan("w0")
        wanted = [min(4, max_tokens - 3)] if max_tokens > 3 else []
        assert second is None or second.num_wanted_drafts == wanted, max_tokens
        world.run()
        world.assert_outputs("r")


def test_drafts_outlive_a_worker_no_more_than_its_blocks() -> None:
    world = heads()
    world.add("r", [1, 2, 3], max_tokens=20)
    world.step()
    world.lose("w0")
    world.join("w1", capacity())  # it has no head
    assert not world.scheduler._drafting.speculations
    world.run()
    assert not any(step.num_wanted_drafts or step.num_draft_tokens for step in world.trace if step.epoch == 2)
    world.assert_outputs("r")


def test_a_worker_with_a_head_does_not_wait_for_the_drafts_of_others() -> None:
    world = heads()
    world.join_draft("d", FakeDraft(skill=1.0))
    world.add("r", [1, 2, 3], max_tokens=20)
    while ("r", 0) not in world.finished:
        plan(world)
        world.answer("w0")
        assert world.scheduler.wake_time is None and not world.updates["d"]
    world.assert_outputs("r")


class HeadStorm(Storm):
    """Some workers have a head, of few drafts or of many, and some have none; there are drafts too."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        for name in list(self.world.workers):
            self.world.lose(name)
            self.vary()
            self.world.join(name)

    def vary(self) -> None:
        """The workers that come from now on."""
        self.world.limits["max_head_drafts"] = self.random.choice([0, 1, 3, 6])

    def disturb(self) -> None:
        self.vary()
        super().disturb()


@pytest.mark.timeout(300)
def test_invariants_hold_through_events_with_draft_heads() -> None:
    num_events = seed = num_accepted = 0
    while num_events < EVENTS:
        storm = HeadStorm(seed)
        for _ in range(2000):
            storm.event()
        storm.settle()
        num_accepted += storm.world.scheduler.counters.num_accepted_tokens
        num_events, seed = num_events + storm.world.num_events, seed + 1
    assert num_accepted, "the storm was too calm"
