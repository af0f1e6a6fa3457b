"""States of rows without a model: what is kept, put back, taken over, saved and loaded."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from engine.execution.tables.row_states import Ints, RowStates
from shared.messages import StepPlan

ROWS, SNAPSHOTS = 4, 3


class Places:
    """What each state has seen, as a word."""

    def __init__(self) -> None:
        self.words = [""] * (2 * ROWS + SNAPSHOTS)

    def copy_states(self, sources: Ints, destinations: Ints) -> None:
        taken = [self.words[source] for source in sources.tolist()]
        for destination, word in zip(destinations.tolist(), taken, strict=True):
            self.words[destination] = word


class Rows:
    """A worker that computes letters."""

    def __init__(self) -> None:
        self.places = Places()
        self.states = RowStates(self.places, ROWS, SNAPSHOTS)

    def begin(self, **changes: Any) -> None:
        self.states.begin(plan(**changes))

    def is_refused(self, row: int, computed: int) -> bool:
        return bool(self.states.contradicts(np.array([row]), np.array([computed]))[0])

    def step(self, row: int, computed: int, word: str, *, keeps: bool = False) -> int:
        """Compute the word's letters behind `computed`; returns how many before that the state had not seen."""
        assert not self.is_refused(row, computed)
        rows, before = np.array([row]), np.array([computed])
        if keeps:
            self.states.keep(rows, before)
        behind = int(self.states.behind(rows, before)[0])
        assert computed == behind or self.places.words[row] == word[: computed - behind]
        self.places.words[row] = word
        self.states.advance(rows, np.array([len(word)]))
        return behind

    def put_back(self, row: int, due: int) -> None:
        self.states.put_back(np.array([row]), np.array([due]))


def plan(**changes: Any) -> StepPlan:
    fields: dict[str, Any] = {
        "epoch": 1, "step_id": 0, "admitted": [], "rows": [], "num_computed_tokens": [], "num_scheduled_tokens": [],
        "num_new_blocks": [], "new_block_ids": [], "block_copies": [], "released_rows": [],
    }  # fmt: skip
    return StepPlan(**(fields | changes))


def test_a_row_goes_on_where_it_stands_only() -> None:
    rows = Rows()
    assert rows.is_refused(0, 3), "it has no state"
    assert rows.step(0, 0, "abc") == 0
    assert rows.is_refused(0, 2) and rows.is_refused(0, 4)
    assert rows.step(0, 3, "abcd") == 0
    rows.begin(released_rows=[0])
    assert rows.is_refused(0, 4) and not rows.is_refused(0, 0)


def test_what_was_not_accepted_is_taken_back_and_the_rest_computed_again() -> None:
    rows = Rows()
    rows.step(1, 0, "abc")
    rows.step(1, 3, "abcdXY", keeps=True)
    rows.put_back(1, 4)
    assert rows.places.words[1] == "abc"
    assert rows.is_refused(1, 3) and rows.is_refused(1, 6)
    assert rows.step(1, 4, "abcdefZ", keeps=True) == 1
    rows.put_back(1, 5)
    assert rows.places.words[1] == "abc", "what was kept has seen no more"
    assert rows.step(1, 5, "abcdef") == 2
    assert rows.step(1, 6, "abcdefg") == 0


def test_a_late_sample_puts_the_last_token_back() -> None:
    rows = Rows()
    rows.step(1, 0, "abc")
    rows.step(1, 3, "abcd", keeps=True)
    rows.put_back(1, 3)
    assert rows.step(1, 3, "abcd") == 0


def test_before_its_first_token_a_state_is_zeros() -> None:
    """What the row had before is not put back."""
    rows = Rows()
    rows.step(2, 0, "xyz")
    rows.begin(released_rows=[2])
    rows.step(2, 0, "abc", keeps=True)
    assert not rows.places.words[ROWS + 2], "nothing is kept, which would need memory"
    rows.put_back(2, 2)
    assert rows.places.words[2] == "abc", "so nothing is copied"
    assert rows.step(2, 2, "abC") == 2


def test_a_fork_takes_over_what_is_released_with_it() -> None:
    rows = Rows()
    rows.step(0, 0, "abc")
    rows.step(1, 0, "xy")
    rows.begin(state_forks=[(1, 0), (2, 0)], released_rows=[0, 1])
    assert rows.is_refused(0, 3)
    assert rows.step(1, 3, "abcd") == rows.step(2, 3, "abce") == 0


@pytest.mark.parametrize("life", [1, 7])
def test_a_snapshot_is_loaded_in_the_life_that_was_saved(life: int) -> None:
    rows = Rows()
    rows.step(0, 0, "abcd")
    whole = plan(rows=[0], num_computed_tokens=[0], num_scheduled_tokens=[4], state_saves=[(0, 2, life)])
    rows.states.save(whole, [0])
    rows.step(0, 4, "abcde")
    wanted: dict[str, Any] = {"rows": [1], "num_computed_tokens": [4], "num_scheduled_tokens": [1]}
    for generation in (life - 1, life + 1):
        rows.begin(**wanted, state_loads=[(1, 2, generation)])
        assert rows.is_refused(1, 4)
    rows.begin(**wanted, state_loads=[(1, 2, life)])
    assert rows.step(1, 4, "abcdX") == 0
    rows.states.reset()
    rows.begin(**wanted, state_loads=[(1, 2, life)])
    assert rows.is_refused(1, 4), "another epoch knows nothing of it"


@pytest.mark.parametrize(("computed", "ran"), [(1, [0]), (0, [])], ids=["it ends elsewhere", "it was refused"])
def test_of_a_row_that_is_not_where_the_plan_has_it_nothing_is_saved(computed: int, ran: list[int]) -> None:
    rows = Rows()
    rows.step(0, 0, "abcd")
    saving = plan(rows=[0], num_computed_tokens=[computed], num_scheduled_tokens=[4], state_saves=[(0, 2, 7)])
    rows.states.save(saving, ran)
    rows.begin(rows=[1], num_computed_tokens=[4], num_scheduled_tokens=[1], state_loads=[(1, 2, 7)])
    assert rows.is_refused(1, 4)


class Storm:
    """Rows, forks, snapshots and steps at random, and what each row's state must have seen."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.rows = Rows()
        self.words: list[str | None] = [None] * ROWS  # tokens of each row that were computed; None: it has no state
        self.seen = [0] * ROWS  # how many of them its state has seen
        self.saved: dict[int, tuple[str, int]] = {}  # what is in a snapshot, and in which of its lives
        self.num_lives = 0

    def turn(self) -> None:
        row, source, snapshot = self.r.randrange(ROWS), self.r.randrange(ROWS), self.r.randrange(SNAPSHOTS)
        match self.r.choice(["step"] * 4 + ["fork", "load", "release", "reset" if self.r.random() < 0.1 else "step"]):
            case "step":
                self.step(row, snapshot)
            case "fork" if source != row:
                gone = [one for one in (row, source) if self.r.random() < 0.5]
                word, seen = self.words[source], self.seen[source]
                self.rows.begin(state_forks=[(row, source)], released_rows=gone)
                self.forget(gone)
                self.words[row], self.seen[row] = word, seen
            case "load" if snapshot in self.saved:
                word, life = self.saved[snapshot]
                wanted = life - (self.r.random() < 0.2)
                self.rows.begin(
                    rows=[row], num_computed_tokens=[len(word)], num_scheduled_tokens=[1],
                    state_loads=[(row, snapshot, wanted)],
                )  # fmt: skip
                self.words[row], self.seen[row] = (word, len(word)) if wanted == life else (None, 0)
            case "release":
                self.rows.begin(released_rows=[row])
                self.forget([row])
            case "reset":
                self.rows.states.reset()
                self.forget(range(ROWS))
                self.saved.clear()
        self.check()

    def forget(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.words[row] = None

    def step(self, row: int, snapshot: int) -> None:
        before = self.words[row] or ""
        word = before + "".join(self.r.choices("abc", k=self.r.randrange(1, 4)))
        keeps = self.r.random() < 0.5
        seen = self.seen[row] if before else 0
        assert self.rows.step(row, len(before), word, keeps=keeps) == len(before) - seen
        self.words[row], self.seen[row] = word, len(word)
        if keeps and self.r.random() < 0.7:
            own = self.r.randrange(len(before), len(word))
            self.rows.put_back(row, own)
            self.words[row], self.seen[row] = word[:own], seen
        self.num_lives += 1
        saving = plan(
            rows=[row], num_computed_tokens=[len(before)], num_scheduled_tokens=[len(word) - len(before)],
            state_saves=[(row, snapshot, self.num_lives)],
        )  # fmt: skip
        self.rows.states.save(saving, [row])
        if self.words[row] == word:
            self.saved[snapshot] = word, self.num_lives

    def check(self) -> None:
        due = [-1 if word is None else len(word) for word in self.words]
        assert self.rows.states.due(np.arange(ROWS)).tolist() == due
        for row in range(ROWS):
            refused = {count for count in range(12) if self.rows.is_refused(row, count)}
            assert refused == set(range(12)) - {0, due[row]}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_a_state_has_seen_its_own_row_s_tokens_alone(seed: int) -> None:
    storm = Storm(seed)
    for _ in range(150):
        storm.turn()
