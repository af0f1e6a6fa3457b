"""Draft tokens of a plan: read, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine.execution.drafts import read_counts, read_drafts
from shared.errors import FatalError
from shared.messages.steps import StepPlan

VOCAB = 20


def plan(counts: list[int], tokens: list[int], num_rows: int = 2, **changes: Any) -> StepPlan:
    rows = list(range(num_rows))
    zeros = [0] * num_rows
    return StepPlan(1, 0, [], rows, zeros, zeros, zeros, [], [], [], counts, tokens, **changes)


@pytest.mark.parametrize(("counts", "tokens"), [([], []), ([0, 0], [])])
def test_a_step_may_have_none(counts: list[int], tokens: list[int]) -> None:
    assert read_counts(plan(counts, tokens)) is None


@pytest.mark.parametrize(
    ("counts", "tokens", "words"),
    [
        ([2], [5, 6], r"draft counts \[2\] for 2 rows"),
        ([1, 1, 0], [5, 6], r"draft counts \[1, 1, 0\] for 2 rows"),
        ([3, -1], [5, 6], r"draft counts \[3, -1\] for 2 rows"),
        ([1, 2], [5, 6], "2 draft tokens for counts that sum to 3"),
        ([0, 0], [5], "1 draft tokens for counts that sum to 0"),
        ([], [5], "1 draft tokens for counts that sum to 0"),
    ],
)
def test_counts_that_no_scheduler_makes_are_refused(counts: list[int], tokens: list[int], words: str) -> None:
    with pytest.raises(FatalError, match=words):
        read_counts(plan(counts, tokens))


def test_each_row_has_its_own_drafts_and_one_position_more() -> None:
    given = plan([2, 0, 1], [0, 6, VOCAB - 1], num_rows=3)
    counts = read_counts(given)
    assert counts is not None and counts.tolist() == [2, 0, 1]
    found = read_drafts(given, counts, VOCAB)
    assert found.token_ids.tolist() == [0, 6, VOCAB - 1] and found.proposals is None
    assert found.starts.tolist() == [0, 3, 4] and found.places.tolist() == [0, 1, 4]


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    given = plan([1, 1], [5, token])
    counts = read_counts(given)
    assert counts is not None
    with pytest.raises(FatalError, match="outside the vocabulary of 20"):
        read_drafts(given, counts, VOCAB)


def test_drafts_without_distributions_were_certain_where_rejection_accepts_them() -> None:
    given = plan([1, 1], [5, 6], rejection=True)
    counts = read_counts(given)
    assert counts is not None and read_drafts(given, counts, VOCAB).proposals is not None
