"""Whose block is whose: the worker's side of generations, without a model."""

from __future__ import annotations

from typing import Any

from engine.execution.block_fence import BlockFence
from engine.execution.partial import completed, without
from shared.block_digest import digest_blocks
from shared.messages import AdmittedSequence, Refusal, RefusedRow, StepPlan, StepResult
from shared.packing import pack_tokens
from shared.sampling import SamplingParams

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
    whole = plan(
        {0: [], 1: [], 2: []}, num_draft_tokens=[1, 2, 0], draft_token_ids=[7, 8, 9], num_computed_tokens=[4, 5, 6]
    )
    part = without(whole, {0})
    assert (part.rows, part.num_computed_tokens, part.draft_token_ids) == ([1, 2], [5, 6], [8, 9])
    refused = [RefusedRow(0, Refusal.NOT_IN_STEP)]
    result = completed(StepResult(1, 0, [2, 1], [8, 3, 4], prompt_logprobs={1: []}), refused, 3)
    assert (result.num_sampled, result.prompt_logprobs, result.refused_rows) == ([0, 2, 1], {2: []}, refused)
