"""What a draft is told and owes: order, gaps, lives, what is stale, what runs ahead."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from services.draft.session import DraftSession
from shared.errors import ProtocolError
from shared.messages import DraftProposals, DraftUpdate
from tests.unit.draft.samples import FORBIDDEN, Counter, admitted, update


class Bench:
    def __init__(self) -> None:
        self.proposer = Counter()
        self.now = 0.0
        self.session = DraftSession(self.proposer, clock=self.tick)

    def tick(self) -> float:
        self.now += 0.5
        return self.now

    def answers(self) -> list[DraftProposals]:
        """All that is owed, worked off."""
        found: list[DraftProposals] = []
        while not self.session.is_idle:
            found += self.session.turn()
        return found

    def answer(self) -> DraftProposals:
        (found,) = self.answers()
        return found


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_answer_with_all_that_is_wanted(bench: Bench) -> None:
    opened = [admitted(0, [10]), admitted(3, [20, 30])]
    bench.session.apply(update(7, {0: (1, [], 2), 3: (2, [31], 3)}, opened=opened))
    assert bench.answer() == DraftProposals(
        epoch=1,
        update_id=7,
        rows=[0, 3],
        num_tokens=[1, 3],
        num_draft_tokens=[2, 3],
        draft_token_ids=[11, 12, 32, 33, 34],
        draft_time=1.5,
    )
    assert bench.proposer.num_pieces == 3, "rows go forward together"


def test_what_is_only_told_is_not_answered(bench: Bench) -> None:
    bench.session.apply(update(1, {0: (1, [11], 0)}, opened=[admitted(0, [10])]))
    assert bench.session.is_idle
    bench.session.apply(update(2, {0: (2, [], 1)}))
    assert bench.answer().draft_token_ids == [12]


def test_what_is_left_of_a_guess_counts(bench: Bench) -> None:
    bench.session.apply(update(1, {0: (1, [], 4)}, opened=[admitted(0, [10])]))
    assert bench.answer().draft_token_ids == [11, 12, 13, 14]
    bench.session.apply(update(2, {0: (1, [11, 12], 2)}))
    assert bench.session.turn()[0].draft_token_ids == [13, 14]
    assert bench.proposer.num_pieces == 4 and bench.session.is_idle
    bench.session.apply(update(3, {0: (3, [13], 3)}))
    assert bench.answer().draft_token_ids == [14, 15, 16]
    bench.session.apply(update(4, {0: (4, [50], 2)}))
    assert bench.answer().draft_token_ids == [51, 52]


def test_a_newer_update_makes_the_older_one_stale(bench: Bench) -> None:
    bench.session.apply(update(1, {0: (1, [], 9), 1: (1, [], 2)}, opened=[admitted(0, [10]), admitted(1, [40])]))
    assert bench.session.turn() == []
    bench.session.apply(update(2, {0: (1, [70], 1)}))
    first, second = bench.answers()
    assert (first.update_id, first.rows, first.draft_token_ids) == (1, [1], [41, 42])
    assert (second.update_id, second.rows, second.draft_token_ids) == (2, [0], [71])


def test_an_answer_names_the_update_that_it_answers(bench: Bench) -> None:
    """Of two workers' rows, the older wish is not to pass for an answer to the newer."""
    bench.session.apply(update(1, {0: (1, [], 2)}, opened=[admitted(0, [10]), admitted(1, [40])]))
    bench.session.turn()
    bench.session.apply(update(2, {1: (1, [], 3)}))
    assert [(answer.update_id, answer.rows) for answer in bench.answers()] == [(1, [0]), (2, [1])]


def test_a_gap_loses_that_row_only(bench: Bench) -> None:
    bench.session.apply(update(1, opened=[admitted(0, [10]), admitted(1, [40])]))
    bench.session.apply(update(2, {0: (2, [12], 2), 1: (1, [], 1), 5: (3, [], 1)}))
    answer = bench.answer()
    assert (answer.rows, answer.draft_token_ids, answer.lost_rows) == ([1], [41], [0, 5])
    assert set(bench.proposer.told) == {1}
    bench.session.apply(update(3, {0: (3, [], 1)}, opened=[admitted(0, [10, 11, 12])], closed=[0]))
    answer = bench.answer()
    assert (answer.rows, answer.draft_token_ids, answer.lost_rows) == ([0], [13], [])


def test_losses_are_told_where_nothing_is_wanted(bench: Bench) -> None:
    bench.session.apply(update(1, {0: (2, [], 0)}))
    answer = bench.answer()
    assert (answer.rows, answer.lost_rows, answer.draft_time) == ([], [0], 0.0)


def test_losses_are_told_where_what_was_wanted_is_stale(bench: Bench) -> None:
    bench.session.apply(update(1, {0: (1, [], 3), 7: (1, [], 3)}, opened=[admitted(0, [10])]))
    bench.session.turn()
    bench.session.apply(update(2, {0: (1, [11], 3)}))
    first, second = bench.answers()
    assert (first.update_id, first.rows, first.lost_rows) == (1, [], [7])
    assert (second.update_id, second.draft_token_ids, second.lost_rows) == (2, [12, 13, 14], [])


def test_what_a_proposer_cannot_follow_is_lost(bench: Bench) -> None:
    opened = [admitted(0, [FORBIDDEN]), admitted(1, [40]), admitted(99, [1]), admitted(2, [])]
    bench.session.apply(update(1, {1: (1, [FORBIDDEN], 2)}, opened=opened))
    answer = bench.answer()
    assert (answer.rows, answer.lost_rows) == ([], [0, 1, 2, 99])
    assert not bench.proposer.told


def test_a_missing_update_loses_everything(bench: Bench) -> None:
    """The missing one may have given a row to another sequence of the same length."""
    bench.session.apply(update(1, opened=[admitted(0, [10]), admitted(1, [40])]))
    bench.session.apply(update(3, {0: (1, [], 1)}, opened=[admitted(1, [50])]))
    answer = bench.answer()
    assert (answer.rows, answer.lost_rows) == ([], [0])
    assert bench.proposer.told == {1: [50]}


def test_drawing_otherwise_begins_from_nothing(bench: Bench) -> None:
    """What was guessed has no distributions, or has them where no request wants them."""
    bench.session.apply(update(1, opened=[admitted(0, [10]), admitted(1, [40])]))
    bench.session.apply(msgspec.structs.replace(update(2, {0: (1, [], 2)}), rejection=True))
    assert bench.answer().lost_rows == [0, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_wanted": []},
        {"num_wanted": [1000]},
        {"num_ahead": 1000},
        {"num_new": [2]},
        {"num_tokens": [-1]},
        {"new_token_ids": []},
        {"rows": [0, 1]},
    ],
)
def test_columns_that_do_not_fit_cost_that_update(bench: Bench, changes: dict[str, Any]) -> None:
    good = update(1, {0: (1, [11], 2)}, opened=[admitted(0, [10])])
    with pytest.raises(ProtocolError):
        bench.session.apply(msgspec.structs.replace(good, **changes))
    assert bench.session.is_idle and not bench.proposer.told
    bench.session.apply(good)
    assert bench.answer().draft_token_ids == [12, 13]


def test_another_epoch_begins_from_nothing(bench: Bench) -> None:
    bench.session.apply(update(5, {0: (1, [], 3)}, opened=[admitted(0, [10])], epoch=2))
    bench.session.apply(update(6, {0: (1, [99], 2)}, epoch=1))
    assert bench.answer().draft_token_ids == [11, 12, 13], "an older epoch is ignored"
    bench.session.apply(update(6, {0: (1, [], 9)}, epoch=2))
    bench.session.apply(update(1, {1: (1, [], 1)}, opened=[admitted(1, [40])], epoch=3))
    answer = bench.answer()
    assert (answer.epoch, answer.rows, answer.lost_rows) == (3, [1], [])
    assert set(bench.proposer.told) == {1}


def test_closed_rows_are_owed_nothing(bench: Bench) -> None:
    bench.session.apply(update(1, {0: (1, [], 3)}, opened=[admitted(0, [10])]))
    bench.session.apply(update(2, closed=[0, 6]))
    assert bench.session.is_idle and not bench.proposer.told


def test_a_row_that_can_have_none_is_answered_without(bench: Bench) -> None:
    bench.proposer.stuck = {0}
    bench.session.apply(update(1, {0: (1, [], 3), 1: (1, [], 1)}, opened=[admitted(0, [10]), admitted(1, [40])]))
    answer = bench.answer()
    assert (answer.rows, answer.num_draft_tokens, answer.draft_token_ids) == ([0, 1], [0, 1], [41])


def test_runs_ahead_once_it_has_answered(bench: Bench) -> None:
    bench.session.apply(update(1, {0: (1, [], 2)}, opened=[admitted(0, [10])], num_ahead=3))
    first, second = bench.answers()
    assert (first.num_tokens, first.draft_token_ids) == ([1], [11, 12])
    assert (second.num_tokens, second.draft_token_ids) == ([1], [11, 12, 13, 14, 15])
    assert first.update_id == second.update_id == 1
    bench.session.apply(update(2, {0: (1, [11, 12, 13], 2)}, num_ahead=3))
    assert bench.session.turn()[0].draft_token_ids == [14, 15], "at once, from what was run ahead"


def test_what_runs_ahead_gives_way(bench: Bench) -> None:
    bench.session.apply(update(1, {0: (1, [], 1)}, opened=[admitted(0, [10]), admitted(1, [40])], num_ahead=4))
    assert bench.session.turn()[0].draft_token_ids == [11]
    bench.session.turn()
    bench.session.apply(update(2, {1: (1, [], 2)}))
    answers = bench.answers()
    assert [answer.rows for answer in answers] == [[1], [0]]
    assert answers[1].draft_token_ids == [11, 12, 13, 14, 15]
    assert answers[1].update_id == 1


def test_what_runs_ahead_ends_with_a_new_update_of_its_row(bench: Bench) -> None:
    bench.session.apply(update(1, {0: (1, [], 1)}, opened=[admitted(0, [10])], num_ahead=4))
    bench.session.turn()
    bench.session.apply(update(2, {0: (1, [90], 0)}))
    assert bench.session.is_idle


def test_nothing_new_is_not_sent_again(bench: Bench) -> None:
    bench.session.apply(update(1, {0: (1, [], 2)}, opened=[admitted(0, [10])], num_ahead=4))
    assert len(bench.session.turn() + bench.session.turn()) == 1
    bench.proposer.stuck = {0}
    assert bench.answers() == []


def test_who_has_much_to_read_keeps_nobody_waiting(bench: Bench) -> None:
    bench.proposer.unread = {1: 5}
    bench.session.apply(update(1, {0: (1, [], 2), 1: (1, [], 2)}, opened=[admitted(0, [10]), admitted(1, [40])]))
    first, second = bench.answers()
    assert (first.rows, first.draft_token_ids) == ([0], [11, 12])
    assert (second.rows, second.draft_token_ids) == ([1], [41, 42])


def test_alone_it_is_waited_for(bench: Bench) -> None:
    bench.proposer.unread = {0: 5}
    bench.session.apply(update(1, {0: (1, [], 2)}, opened=[admitted(0, [10])]))
    assert bench.answer().draft_token_ids == [11, 12]


class Truth:
    """What a scheduler holds of the rows that a draft follows, made up at random."""

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)
        self.tokens: dict[int, list[int]] = {}
        self.told: dict[int, int] = {}
        self.opened_by: dict[int, int] = {}
        self.num_drafts = 0
        self.num_lost = 0

    def update(self, update_id: int) -> DraftUpdate:
        draw = self.generator
        closed = [row for row in self.tokens if draw.random() < 0.05]
        for row in closed:
            del self.tokens[row]
        opened = [row for row in range(8) if row not in self.tokens and draw.random() < 0.3]
        for row in opened:
            self.tokens[row], self.told[row], self.opened_by[row] = [draw.randrange(100)], 1, update_id
        admissions = [admitted(row, self.tokens[row]) for row in opened]
        columns = {row: self.tell(row) for row in self.tokens if draw.random() < 0.6}
        return update(update_id, columns, opened=admissions, closed=closed, num_ahead=draw.randrange(3))

    def tell(self, row: int) -> tuple[int, list[int], int]:
        draw, tokens = self.generator, self.tokens[row]
        before = self.told[row]
        for _ in range(draw.randrange(4)):
            tokens.append(tokens[-1] + 1 if draw.random() < 0.7 else draw.randrange(100))
        self.told[row] = len(tokens)
        return before + (draw.random() < 0.02), tokens[before:], draw.randrange(5)

    def check(self, answer: DraftProposals) -> None:
        drafts = iter(answer.draft_token_ids)
        for row, num_tokens, count in zip(answer.rows, answer.num_tokens, answer.num_draft_tokens, strict=True):
            last = self.tokens[row][num_tokens - 1]
            assert [next(drafts) for _ in range(count)] == list(range(last + 1, last + 1 + count))
            self.num_drafts += count
        for row in answer.lost_rows:
            if row in self.tokens and self.opened_by[row] <= answer.update_id:
                del self.tokens[row]
                self.num_lost += 1


def test_random_updates_never_bring_a_guess_that_does_not_follow(bench: Bench) -> None:
    """Whatever is told, lost, stale or opened again: a proposal continues the tokens that it names."""
    truth = Truth(seed=3)
    for update_id in range(1, 4000):
        bench.session.apply(truth.update(update_id))
        for _ in range(truth.generator.randrange(8)):
            for answer in bench.session.turn():
                truth.check(answer)
    assert truth.num_drafts > 1000 and truth.num_lost > 50
