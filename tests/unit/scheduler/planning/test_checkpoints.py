"""Where prompts are cut at workers that keep states, and what later ones begin with."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.planning.checkpoints import LEAST_BLOCKS
from services.scheduler.state.policy import Policy
from shared.messages import StepPlan
from shared.requests.beam import Beam
from shared.requests.grammar import Grammar, GrammarKind
from tests.unit.scheduler.worlds.beam_world import BeamWorld
from tests.unit.scheduler.worlds.world import World

SIZE = 8
LEAST = LEAST_BLOCKS * SIZE
COMMON = [(7 * i) % 50 for i in range(60)]


def world_of(policy: Policy | None = None, num_snapshots: int = 8, **limits: int) -> World:
    return World(policy or Policy(max_num_batched_tokens=256), num_snapshots=num_snapshots, **limits)


def ends_of(plans: list[StepPlan]) -> list[int]:
    """Of the chunks of prompts, in which more than one token is computed."""
    return [
        computed + count
        for plan in plans
        for computed, count in zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
        if count > 1
    ]


def told(world: World, request_id: str, prompt: list[int], **params: Any) -> list[StepPlan]:
    """The plans of one request by itself."""
    before = len(world.trace)
    world.add(request_id, prompt, **params)
    world.run()
    world.assert_outputs(request_id)
    return world.trace[before:]


@pytest.mark.parametrize(
    ("length", "ends"),
    [
        (LEAST - 1, [LEAST - 1]),
        (LEAST, [LEAST]),  # its last block holds its last token, which is always computed
        (LEAST + 1, [LEAST]),
        (LEAST + 2, [LEAST, LEAST + 2]),
        (50, [48, 50]),
    ],
)
def test_a_prompt_is_cut_behind_its_last_whole_block(length: int, ends: list[int]) -> None:
    world = world_of()
    plans = told(world, "a", COMMON[:length])
    assert ends_of(plans) == ends
    saves = [save for plan in plans for save in plan.state_saves]
    assert len(saves) == (length > LEAST)


def test_the_last_token_of_a_prompt_with_a_grammar_is_computed_by_itself() -> None:
    """It may be computed again, from the state before its step."""
    grammar = Grammar(GrammarKind.COMPILED, "start: /x*/")
    for length in (20, LEAST + 2):
        plans = told(world_of(), "a", COMMON[:length], grammar=grammar, max_tokens=1)
        parts = [(plan.num_computed_tokens[0], plan.num_scheduled_tokens[0]) for plan in plans]
        assert parts[-1] == (length - 1, 1)


def test_the_same_prompt_again_begins_with_its_snapshot() -> None:
    world = world_of()
    told(world, "a", COMMON)
    first, *_ = told(world, "b", COMMON)
    assert first.num_computed_tokens == [56] and len(first.state_loads) == 1
    assert not any(plan.state_saves for plan in world.trace[-2:]), "what there is is not taken again"


def test_where_two_prompts_part_a_snapshot_is_taken_for_the_third() -> None:
    world = world_of()
    told(world, "a", [*COMMON[:40], *range(12)])
    assert ends_of(told(world, "b", [*COMMON[:40], *range(20, 32)])) == [40, 52], "the second end is near to the first"
    first, *_ = told(world, "c", [*COMMON[:40], *range(30, 42)])
    assert first.num_computed_tokens == [40]


def test_of_some_that_arrive_at_once_the_others_wait_for_the_snapshot() -> None:
    world = world_of()
    for index in range(4):
        world.add(f"r{index}", [*COMMON[:40], *range(6 * index, 6 * index + 24)])
    world.run()
    world.assert_outputs()
    assert world.scheduler.counters.num_prefix_cache_hits == 2 * 40, "the first two show what they have in common"


def test_the_same_prompt_that_arrives_at_once_waits_for_the_snapshot() -> None:
    world = world_of()
    for name in "ab":
        world.add(name, COMMON)
    world.run()
    world.assert_outputs()
    assert world.scheduler.counters.num_prefix_cache_hits == 56


def test_a_prompt_that_parts_before_the_snapshot_does_not_wait_for_it() -> None:
    world = world_of()
    world.add("a", COMMON)
    world.add("b", [*COMMON[:48], *range(12)])
    world.run()
    world.assert_outputs()
    assert len(world.trace[0].rows) == 2


def test_a_prompt_that_is_too_long_for_a_step_goes_on_as_it_did() -> None:
    world = world_of(Policy(max_num_batched_tokens=20))
    assert ends_of(told(world, "a", COMMON)) == [20, 40, 56, 60]


@pytest.mark.parametrize(
    "policy",
    [Policy(max_num_batched_tokens=256, enable_prefix_caching=False),
     Policy(max_num_batched_tokens=256, enable_chunked_prefill=False)],
)  # fmt: skip
def test_without_a_cache_or_chunks_nothing_is_cut(policy: Policy) -> None:
    world = world_of(policy)
    for name in "ab":
        plans = told(world, name, COMMON)
        assert ends_of(plans) == [60]
        assert not any(plan.state_saves or plan.state_loads for plan in plans)


def test_without_memory_for_snapshots_everything_is_computed() -> None:
    world = world_of(num_snapshots=0)
    assert [ends_of(told(world, name, COMMON)) for name in "ab"] == [[60], [60]]
    assert not world.scheduler.counters.num_prefix_cache_hits


def test_siblings_begin_with_the_snapshot_of_the_first() -> None:
    world = world_of()
    plans = told(world, "a", COMMON, n=3)
    assert [len(plan.state_loads) for plan in plans if plan.state_loads] == [2]
    assert not any(plan.block_copies for plan in plans)


@pytest.mark.parametrize("num_blocks", [9, 40])
def test_beams_take_over_the_states_where_they_begin(num_blocks: int) -> None:
    world = BeamWorld(num_blocks=num_blocks, block_size=SIZE, num_snapshots=4, max_num_seqs=12)
    for index in range(3):
        world.add_beam(f"r{index}", COMMON[index : index + 12], Beam(3 + index, 1.0), n=2, max_tokens=14)
    world.run()
    world.assert_outputs()
    assert sum(len(plan.state_forks) for plan in world.trace) > 10
    if num_blocks == 9:
        assert world.scheduler.counters.num_preemptions


def test_a_worker_without_states_is_told_nothing_of_them() -> None:
    world = World(Policy(max_num_batched_tokens=256))
    plans = told(world, "a", COMMON, n=2)
    assert ends_of(plans) == [60]
    assert not any(plan.state_forks or plan.state_loads or plan.state_saves for plan in plans)
