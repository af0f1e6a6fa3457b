"""A budget of reasoning followed token by token, with tags of one token and of several."""

from __future__ import annotations

import numpy as np

from engine.execution.budgeted import BudgetedAutomaton
from shared.reasoning import ReasoningMeter, ReasoningTags, ThinkingBudget, is_left_open

ONE = ReasoningTags([1], [[2]], [2, 3])
LONG = ReasoningTags([1, 4], [[2, 5], [6]], [2, 5, 7])
SIZE = 10


def automaton(tags: ReasoningTags, budget: int, *, is_open: bool = False) -> BudgetedAutomaton:
    return BudgetedAutomaton(ThinkingBudget(tags, budget, is_open), SIZE, None, ())


def next_of(one: BudgetedAutomaton) -> list[int]:
    return [int(token) for token in np.flatnonzero(one.allowed())]


def test_it_is_free_outside_and_within_the_budget() -> None:
    one = automaton(ONE, 2)
    for token in (9, 9, 9, 1, 9):
        assert len(next_of(one)) == SIZE
        one.advance([token])
    one.advance([8])
    assert next_of(one) == [2]
    one.advance([2])
    assert next_of(one) == [3]
    one.advance([3, 9])
    assert len(next_of(one)) == SIZE
    one.advance([1])
    assert next_of(one) == [2], "the budget is of all reasoning together"


def test_an_end_that_was_begun_is_completed_and_any_end_counts() -> None:
    one = automaton(LONG, 2, is_open=True)
    one.advance([9, 2])
    assert next_of(one) == [5]
    one.advance([5])
    assert next_of(one) == [7]
    other = automaton(LONG, 2, is_open=True)
    other.advance([9, 6, 9, 9, 9])
    assert len(next_of(other)) == SIZE


def test_drafts_beyond_the_budget_are_not_valid_and_leave_no_trace() -> None:
    one = automaton(ONE, 2, is_open=True)
    assert one.num_valid([9, 9, 9, 9]) == 2 and one.num_valid([9, 9, 2, 3, 9]) == 5
    found = one.allowed_behind([9, 9, 2])
    assert [int(row.sum()) for row in found] == [SIZE, SIZE, 1, 1]
    assert len(next_of(one)) == SIZE


def test_the_meter_counts_what_stands_between_the_tags() -> None:
    meter = ReasoningMeter(LONG)
    meter.advance([1, 9, 1, 4, 9, 2, 9, 2, 5, 9, 9])
    assert (meter.num_tokens, meter.is_inside) == (3, False)


def test_prompts_that_end_within_reasoning() -> None:
    assert is_left_open([9, 2, 9, 1], ONE) and is_left_open([1], ONE)
    assert not is_left_open([1, 9, 2], ONE) and not is_left_open([], ONE) and not is_left_open([1], LONG)
