"""A budget of reasoning followed token by token, with tags of one token and of several."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from engine.execution.constraints.budgeted import BudgetedAutomaton
from shared.automata.automaton import make_automaton
from shared.automata.limits import GrammarError
from shared.packing import pack_tokens
from shared.requests.reasoning import ReasoningMeter, ReasoningTags, ThinkingBudget, is_left_open
from tests.engine.execution.constraints.test_row_automata import EOS, TOKENIZER, choice, load

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


def test_a_draft_that_is_not_allowed_is_found_in_every_place() -> None:
    one = automaton(ONE, 1, is_open=True)
    assert [one.num_valid(drafts) for drafts in ([], [9], [9, 9], [9, 9, 2], [2, 9])] == [0, 1, 1, 1, 2]


def test_without_a_budget_reasoning_that_is_begun_ends_at_once() -> None:
    assert next_of(automaton(LONG, 0, is_open=True)) == [2]


# -- an answer that has a grammar

YES, NO = TOKENIZER.encode_plain("yes"), TOKENIZER.encode_plain("no")
BEGIN, END, OTHER_END, LEAD = [300, 301, 302], [303, 304], [305], [306, 307]
TAGS = ReasoningTags(BEGIN, [END, OTHER_END], [*END, *LEAD])


def held(budget: int = 100, *, is_open: bool = False) -> BudgetedAutomaton:
    grammar = make_automaton(load(EOS), choice("yes", "no").text)
    return BudgetedAutomaton(ThinkingBudget(TAGS, budget, is_open), TOKENIZER.vocab_size, grammar, EOS)


def behind(*token_ids: int) -> set[int]:
    """The tokens that may follow these."""
    one = held()
    one.advance(token_ids)
    return set(next_of(one))


def test_reasoning_may_come_before_the_answer_and_not_within_it() -> None:
    first = {token for token in next_of(held()) if token != BEGIN[0]}
    assert {YES[0], NO[0]} <= first and not first & {*EOS, *BEGIN, *END, 9}
    assert behind() == first | {BEGIN[0]}
    assert behind(BEGIN[0]) == {BEGIN[1]} and behind(*BEGIN[:2]) == {BEGIN[2]}
    assert behind(*BEGIN, 9, *END, *LEAD) == first | {BEGIN[0]}
    assert behind(*BEGIN, 9, *END, *LEAD, *BEGIN, 9, *END, *LEAD) == first | {BEGIN[0]}
    assert BEGIN[0] not in behind(YES[0])
    assert behind(*YES) == behind(*BEGIN, *OTHER_END, *LEAD, *YES) == set(EOS)


def test_reasoning_is_free_but_for_an_end_of_sequence() -> None:
    assert behind(*BEGIN) == behind(*BEGIN, 9) == set(range(TOKENIZER.vocab_size)) - set(EOS)


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_any_end_is_followed_by_what_leads_to_the_answer(end: list[int]) -> None:
    assert behind(*BEGIN, 9, *end) == {LEAD[0]}
    assert behind(*BEGIN, 9, *end, LEAD[0]) == {LEAD[1]}


def test_an_answer_that_breaks_the_grammar_is_an_error() -> None:
    for before in ([], [*BEGIN, 9, *END, *LEAD]):
        one = held()
        one.advance(before)
        with pytest.raises(GrammarError):
            one.advance([9])


def test_drafts_stop_at_an_end_of_sequence() -> None:
    found = held().allowed_behind([*YES, EOS[0], 9])
    assert set(np.flatnonzero(found[len(YES)])) == set(EOS) and found[len(YES) + 1 :].all()
    assert held().num_valid([*YES, EOS[0]]) == len(YES) + 1 and held().num_valid([*YES, 9]) == len(YES)


def parts_of(output: list[int], *, is_open: bool) -> tuple[list[list[int]], list[int]]:
    """The reasoning, and the answer with its end."""
    thoughts: list[list[int]] = []
    place, inside = 0, is_open
    while inside or output[place : place + 3] == BEGIN:
        place = first = place if inside else place + 3
        while not any(output[first:place][-len(end) :] == end for end in (END, OTHER_END)):
            place += 1
        thoughts.append(output[first : place - (2 if output[place - 1] == END[1] else 1)])
        assert output[place : place + 2] == LEAD
        place, inside = place + 2, False
    return thoughts, output[place:]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_is_reasoning_within_its_budget_and_an_answer_of_the_grammar(seed: int) -> None:
    r = random.Random(seed)
    budget, is_open = r.randrange(7), r.random() < 0.5
    one, output = held(budget, is_open=is_open), list[int]()
    likely = [*BEGIN, *END, *OTHER_END, *LEAD, *YES, *NO, *EOS, 9, 9, 9]
    while not set(output) & set(EOS):
        allowed = one.allowed()
        drafts = r.choices(likely, k=3)
        flags, alone = one.allowed_behind(drafts), one.copy()
        num_valid = one.num_valid(drafts)
        for place, draft in enumerate(drafts[:num_valid]):
            assert flags[place, draft] and (flags[place] == alone.allowed()).all()
            if draft in EOS:
                break  # what is behind the end is void
            alone.advance([draft])
        assert num_valid == len(drafts) or not flags[num_valid, drafts[num_valid]]
        assert (one.allowed() == allowed).all(), "it stays where it is"
        output.append(r.choice([token for token in likely if allowed[token]] or np.flatnonzero(allowed).tolist()))
        one.advance([token for token in output[-1:] if token not in EOS])
    thoughts, answer = parts_of(output, is_open=is_open)
    assert sum(map(len, thoughts)) <= budget
    assert TOKENIZER.decode(answer[:-1]) in ("yes", "no") and answer[-1] in EOS


def test_the_meter_counts_what_stands_between_the_tags() -> None:
    meter = ReasoningMeter(LONG)
    meter.advance([1, 9, 1, 4, 9, 2, 9, 2, 5, 9, 9])
    assert (meter.num_tokens, meter.is_inside) == (3, False)


@pytest.mark.parametrize(
    ("prompt", "tags", "is_open"),
    [
        ([9, 2, 9, 1], ONE, True),
        ([1], ONE, True),
        ([1, 9, 2], ONE, False),
        ([], ONE, False),
        ([1], LONG, False),
        ([9, 1, 4, 9], LONG, True),
        ([1, 4, 2, 9, 5], LONG, True),
        ([1, 4, 9, 2, 5], LONG, False),
        ([1, 4, 6, 1], LONG, False),
        ([1, 256, 2 << 24, 0], ONE, True),
        ([256, 0], ONE, False),
    ],
)
def test_prompts_that_end_within_reasoning(prompt: list[int], tags: ReasoningTags, is_open: bool) -> None:
    assert is_left_open(pack_tokens(prompt), tags) is is_open


def test_a_long_prompt_is_looked_through_in_as_few_calls_as_a_short_one() -> None:
    calls: list[str] = []

    def num_calls(prompt: bytes) -> int:
        calls.clear()
        sys.setprofile(lambda _, event, argument: calls.append(event))
        try:
            assert not is_left_open(prompt, LONG)
        finally:
            sys.setprofile(None)
        return len(calls)

    assert num_calls(pack_tokens([9] * 10_000)) == num_calls(pack_tokens([9] * 10))
