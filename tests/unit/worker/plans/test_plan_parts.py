"""Plans in parts: together they say what the plan says, and their results what its result would."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from services.worker.plans.plan_parts import PlanDivider, join_results
from shared.messages import (
    AdmittedSequence,
    DraftDistribution,
    Refusal,
    RefusedRow,
    SlidingPlan,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from shared.requests.sampling import SamplingParams

COLUMNS = (
    *("rows", "num_computed_tokens", "num_scheduled_tokens", "num_new_blocks", "new_block_ids"),
    *("new_block_generations", "num_draft_tokens", "draft_token_ids", "draft_distributions"),
)


def admission(row: int) -> AdmittedSequence:
    return AdmittedSequence(row, b"", 1, SamplingParams(), 0, [])


def random_plan(rng: random.Random, step_id: int = 0) -> StepPlan:
    rows = rng.sample(range(20), rng.randint(1, 9))
    news = [rng.randint(0, 3) for _ in rows]
    drafts = [rng.randint(0, 2) for _ in rows]
    blocks = [rng.randrange(100) for _ in range(sum(news))]
    released = rng.sample(range(20), 3)
    sliding = SlidingPlan([rng.randint(0, 1) for _ in rows], news[::-1], blocks[::-1], blocks)
    distributions = [DraftDistribution(bytes([i]), b"") for i in range(sum(drafts))]
    return StepPlan(
        epoch=1,
        step_id=step_id,
        admitted=[admission(row) for row in rows if rng.random() < 0.3],
        rows=rows,
        num_computed_tokens=[rng.randrange(100) for _ in rows],
        num_scheduled_tokens=[rng.choice((1, 1, 1, 16)) for _ in rows],
        num_new_blocks=news,
        new_block_ids=blocks,
        block_copies=[],
        released_rows=[row for row in released if row not in rows or rng.random() < 0.5],
        num_draft_tokens=drafts,
        draft_token_ids=list(range(sum(drafts))),
        draft_distributions=distributions if rng.random() < 0.5 else [],
        new_block_generations=blocks[::-1],
        sliding=[sliding],
    )


def joined(parts: list[Any], name: str) -> list[Any]:
    return [one for part in parts for one in getattr(part, name)]


@pytest.mark.parametrize("seed", range(40))
def test_parts_together_are_the_plan(seed: int) -> None:
    rng = random.Random(seed)
    divider = PlanDivider(rng.choice((2, 3, 4)))
    for step_id in range(20):
        plan = random_plan(rng, step_id)
        parts = divider.divide(plan)
        plans = [part.plan for part in parts]
        for name in COLUMNS:
            assert joined(plans, name) == getattr(plan, name), name
        for name in ("num_left_blocks", "num_new_blocks", "new_block_ids", "new_block_generations"):
            assert joined([one.sliding[0] for one in plans], name) == getattr(plan.sliding[0], name), name
        assert sorted(joined(plans, "released_rows")) == sorted(plan.released_rows)
        assert {one.row for one in joined(plans, "admitted")} == {one.row for one in plan.admitted}
        assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
        for part in parts:  # a row that is used again is released where it is admitted, and no part touches another's
            again = {one.row for one in part.plan.admitted} & set(plan.released_rows)
            assert again <= set(part.plan.released_rows)
        assert sum(len(part.rows) for part in parts) == len(frozenset().union(*(part.rows for part in parts)))


def decode(rows: list[int], **changes: Any) -> StepPlan:
    ones = [1] * len(rows)
    plan = StepPlan(1, 0, [], rows, ones, ones, [0] * len(rows), [], [], [])
    return msgspec.structs.replace(plan, **changes)


def rows_of(divider: PlanDivider, plan: StepPlan) -> list[list[int]]:
    return [part.plan.rows for part in divider.divide(plan)]


def test_rows_stay_in_their_part_until_parts_are_too_uneven() -> None:
    divider = PlanDivider(2)
    assert rows_of(divider, decode(list(range(8)))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows_of(divider, decode([*range(1, 8), 9])) == [[1, 2, 3], [4, 5, 6, 7, 9]]
    assert rows_of(divider, decode([3, 4, 5, 6, 7, 9])) == [[3, 4, 5], [6, 7, 9]]


def test_a_long_chunk_makes_a_part_of_its_own() -> None:
    plan = decode([0, 1, 2, 3], num_scheduled_tokens=[1, 1, 1, 64])
    assert rows_of(PlanDivider(2), plan) == [[0, 1, 2], [3]]


def test_copies_of_blocks_keep_a_plan_whole() -> None:
    assert rows_of(PlanDivider(2), decode([0, 1], block_copies=[(1, 2)])) == [[0, 1]]
    sliding = [SlidingPlan([0, 0], [0, 0], [], [], [(1, 2)])]
    assert rows_of(PlanDivider(2), decode([0, 1], sliding=sliding)) == [[0, 1]]


def test_results_are_joined_by_entries() -> None:
    said = TokenLogprobs([7], [-0.5], 1)
    first = StepResult(1, 0, [1, 0], [7], logprobs=[said], refused={1: "no"}, device_time=1.0)
    second = StepResult(
        1, 0, [0, 2], [8, 9], prompt_logprobs={0: [said]}, embeddings={1: b"e"},
        refused_rows=[RefusedRow(0, Refusal.NOT_IN_STEP)],
    )  # fmt: skip
    plans = [decode([4, 5]), decode([6, 7])]
    whole = join_results(decode([4, 5, 6, 7]), [first, second], plans)
    assert (whole.num_sampled, whole.sampled_token_ids) == ([1, 0, 0, 2], [7, 8, 9])
    assert whole.logprobs == [said, None, None]
    assert (whole.prompt_logprobs, whole.refused, whole.embeddings) == ({2: [said]}, {1: "no"}, {3: b"e"})
    assert [row.entry for row in whole.refused_rows] == [2]
