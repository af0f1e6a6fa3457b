"""Whose block is whose: the worker's side of generations, without a model."""

from __future__ import annotations

from typing import Any

from engine.execution.outputs.partial import completed, without
from engine.execution.tables.block_fence import BlockFence
from shared.block_digest import digest_blocks
from shared.messages import (
    AdmittedSequence,
    DraftDistribution,
    Refusal,
    RefusedRow,
    SlidingPlan,
    StepPlan,
    StepResult,
)
from shared.packing import pack_tokens
from shared.requests.sampling import SamplingParams

SIZE = 4


def fence() -> BlockFence:
    return BlockFence(num_rows=4, num_blocks=16, block_size=SIZE)


def admission(row: int) -> AdmittedSequence:
    return AdmittedSequence(row, pack_tokens([1] * 8), 8, SamplingParams(), 1, [0])


def plan(blocks: dict[int, list[tuple[int, int]]], **changes: Any) -> StepPlan:
    """RowHolder, and (block, generation) that each is given; each computes four tokens from its start."""
    given = [life for lives in blocks.values() for life in lives]
    fields: dict[str, Any] = {
        "epoch": 1, "step_id": 0, "admitted": [], "rows": list(blocks), "num_computed_tokens": [0] * len(blocks),
        "num_scheduled_tokens": [SIZE] * len(blocks), "num_new_blocks": [len(lives) for lives in blocks.values()],
        "new_block_ids": [block for block, _ in given], "block_copies": [], "released_rows": [],
        "new_block_generations": [generation for _, generation in given],
    }  # fmt: skip
    return StepPlan(**(fields | changes))


def test_what_is_shared_is_nobody_s_loss() -> None:
    held = fence()
    assert held.read(plan({0: [(5, 1)]}, admitted=[admission(0)])) == []
    assert held.read(plan({1: [(5, 1), (6, 1)]}, admitted=[admission(1)])) == []
    assert held.holdings() == ([0, 1], [digest_blocks([5], [1]), digest_blocks([5, 6], [1, 1])])


def test_a_block_that_is_given_anew_makes_its_old_holder_stale() -> None:
    held = fence()
    held.read(plan({0: [(5, 1)]}, admitted=[admission(0)]))
    refused = held.read(plan({0: [], 1: [(5, 2)]}, admitted=[admission(1)]))
    assert refused == [RefusedRow(0, Refusal.STALE_BLOCK, 5, 1, 2)]
    assert held.read(plan({1: [], 0: []})) == [RefusedRow(1, Refusal.STALE_BLOCK, 5, 1, 2)], "it stays so"
    assert held.read(plan({0: [(7, 1)]}, admitted=[admission(0)], released_rows=[0])) == []


def test_who_comes_with_an_old_generation_is_stale() -> None:
    held = fence()
    held.read(plan({0: [(5, 4)]}, admitted=[admission(0)]))
    assert [one.known for one in held.read(plan({1: [(5, 3)]}, admitted=[admission(1)]))] == [4]


def test_who_is_given_its_own_block_again_is_stale() -> None:
    held = fence()
    refused = held.read(plan({0: [(5, 1), (6, 1), (5, 2)]}, admitted=[admission(0)]))
    assert [(one.block_id, one.generation) for one in refused] == [(5, 1)]


def test_what_a_refused_row_was_to_fill_is_not_there_for_others() -> None:
    held = fence()
    held.read(plan({0: [(5, 1), (6, 1)]}, admitted=[admission(0)]))
    held.read(plan({1: [(5, 2)]}, admitted=[admission(1)]))  # row 0 has lost its first block
    (refused,) = held.read(plan({0: []}, num_computed_tokens=[4]))
    assert refused.unwritten == [(6, 1)]
    (follower,) = held.read(plan({2: [(6, 1)]}, admitted=[admission(2)]))
    assert (follower.reason, follower.block_id, follower.known) == (Refusal.STALE_BLOCK, 6, 2)


def test_a_copy_of_what_is_another_s_is_not_begun_with() -> None:
    held = fence()
    held.read(plan({0: [(5, 3)]}, admitted=[admission(0)]))
    stale = plan({1: [(6, 1)]}, admitted=[admission(1)], block_copies=[(5, 6)], copy_generations=[2])
    refused = held.read(stale)
    assert [one.entry for one in refused] == [0]
    assert held.keeps(stale, refused) == [[]]
    fresh = plan({1: [(7, 1)]}, admitted=[admission(1)], block_copies=[(5, 7)], copy_generations=[3])
    assert held.read(fresh) == []
    assert held.keeps(fresh, []) == [[(5, 7)]]


def test_another_epoch_begins_from_nothing() -> None:
    held = fence()
    held.read(plan({0: [(5, 9)]}, admitted=[admission(0)]))
    held.reset()
    assert held.holdings() == ([], [])
    assert held.read(plan({1: [(5, 1)]}, admitted=[admission(1)])) == []


def test_a_part_of_a_plan_and_its_result_as_that_of_the_whole() -> None:
    lives = {0: [(1, 1)], 1: [], 2: [(2, 1), (3, 1)]}
    whole = plan(
        lives, num_draft_tokens=[1, 2, 0], draft_token_ids=[7, 8, 9], num_computed_tokens=[4, 5, 6],
        num_scheduled_tokens=[2, 3, 4], num_wanted_drafts=[1, 0, 3], block_copies=[(1, 2)], copy_generations=[1],
        draft_distributions=[DraftDistribution(bytes([one]), b"") for one in range(3)],
        sliding=[SlidingPlan([1, 0, 0], [0, 1, 0], [4], [1])],
    )  # fmt: skip
    part = without(whole, {0})
    assert (part.rows, part.num_computed_tokens, part.num_scheduled_tokens) == ([1, 2], [5, 6], [3, 4])
    assert (part.num_draft_tokens, part.draft_token_ids, part.num_wanted_drafts) == ([2, 0], [8, 9], [0, 3])
    assert [one.token_ids for one in part.draft_distributions] == [bytes([1]), bytes([2])]
    assert part.num_new_blocks == [0, 0], "the rows have them already"
    assert not (part.new_block_ids or part.new_block_generations or part.block_copies or part.copy_generations)
    assert not part.sliding
    refused = [RefusedRow(0, Refusal.NOT_IN_STEP)]
    computed = StepResult(1, 0, [2, 1], [8, 3, 4], prompt_logprobs={1: []}, num_head_drafts=[0, 3])
    result = completed(computed, refused, 3)
    assert (result.num_sampled, result.prompt_logprobs, result.refused_rows) == ([0, 2, 1], {2: []}, refused)
    assert result.num_head_drafts == [0, 0, 3]


def test_a_part_of_a_plan_without_drafts_has_none() -> None:
    part = without(plan({0: [], 1: []}), {1})
    assert part == plan({0: []})
    assert completed(StepResult(1, 0, [1], [8]), [RefusedRow(1, Refusal.NOT_IN_STEP)], 2).num_head_drafts == []
