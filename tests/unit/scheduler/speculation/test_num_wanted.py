"""How many draft tokens one sequence is given, and for how long a step waits for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from services.scheduler.draft_length.modes import SpeculationMode
from services.scheduler.speculation.drafts import DraftLink
from services.scheduler.speculation.records import DraftRecords
from services.scheduler.speculation.speculation import LEAST_PATIENCE, MOST_PATIENCE, PROBE, Speculation
from services.scheduler.state.sequence import Sequence


def sequence(num_output_tokens: int = 5) -> Sequence:
    return cast(Sequence, SimpleNamespace(num_output_tokens=num_output_tokens))


class Table(DraftRecords):
    """All sequences have one share of accepted tokens."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def of(self, sequence: Sequence) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(acceptance=SimpleNamespace(share=lambda prior: self.share))


def speculation(share: float, *, fixed: int = 0, num_draft_tokens: int = 8) -> Speculation:
    made = Speculation(Table(share), fixed=fixed, longest=8)
    made.mode = SpeculationMode(fixed or num_draft_tokens)
    return made


@pytest.mark.parametrize(
    ("share", "count"),
    [(1.0, 8), (0.5, 4), (0.3, 2), (0.06, 1), (0.05, 1), (0.049, 0)],  # while a chance of one in twenty is left
)
def test_drafts_are_wanted_while_they_are_likely_enough(share: float, count: int) -> None:
    assert speculation(share).num_wanted(sequence()) == count
    assert speculation(share, num_draft_tokens=2).num_wanted(sequence()) == min(2, count)
    assert speculation(share, fixed=3).num_wanted(sequence()) == 3, "as was asked for"


def test_one_that_gets_none_is_tried_now_and_then() -> None:
    hopeless = speculation(0.01)
    assert [n for n in range(3 * PROBE) if hopeless.num_wanted(sequence(n))] == [0, PROBE, 2 * PROBE]
    assert hopeless.num_wanted(sequence(PROBE)) == 1
    assert speculation(0.5).num_wanted(sequence(PROBE)) == 4


def test_the_time_of_drafts_is_smoothed_from_the_second_on() -> None:
    made = speculation(0.5)
    made.drafted(1.0)
    assert made.draft_seconds == 1.0
    made.drafted(2.0)
    assert made.draft_seconds == pytest.approx(1.1)


class Link:
    def __init__(self, *, is_late: bool = False) -> None:
        self.num_answered = 0
        self.is_late = is_late
        self.is_gone = False


def test_a_step_waits_for_drafts_that_were_asked_and_are_not_late() -> None:
    made, quick, late = speculation(0.8), Link(), Link(is_late=True)
    made.ask(cast(dict[DraftLink, int], {quick: 3, late: 3}), [sequence()], 10.0)
    wake_time = made.wake_time
    assert wake_time is not None and 10.0 + LEAST_PATIENCE <= wake_time <= 10.0 + MOST_PATIENCE
    quick.num_answered = 2
    assert made.waits(10.0) and made.waits(wake_time - 1e-6) and not made.waits(wake_time)
    assert made.give_up() == 1 and quick.is_late and made.wake_time is None and not made.waits(10.0)
    again = Link()
    made.ask(cast(dict[DraftLink, int], {again: 3}), [sequence()], 10.0)
    again.num_answered = 3
    assert not made.waits(10.0) and made.give_up() == 0 and not again.is_late
    made.planned()
    assert not made.has_asked


@pytest.mark.parametrize(("share", "seconds"), [(0.0, LEAST_PATIENCE), (0.5, 0.05 * (0.5 + 0.25)), (1.0, 0.1)])
def test_the_patience_is_what_plain_steps_would_take_for_the_tokens_that_drafts_bring(
    share: float, seconds: float
) -> None:
    made = speculation(share, num_draft_tokens=2)
    made.ask(cast(dict[DraftLink, int], {Link(): 1}), [sequence()], 10.0)
    assert made.wake_time == pytest.approx(10.0 + seconds)
