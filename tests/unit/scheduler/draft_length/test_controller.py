"""How many draft tokens: never much worse than the best mode, whatever steps cost, and however noisy that is."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest

from services.scheduler.draft_length.controller import SURPRISES, DraftLengthController, between
from services.scheduler.draft_length.modes import LENGTHS, PLAIN, Cost, SpeculationMode, believed, modes_of, yields
from services.scheduler.speculation.speculation import size_of


def settled(
    costs: dict[SpeculationMode, float], share: float, draft: float, num_steps: int = 4000, *, fixed: int = 0
) -> tuple[DraftLengthController, float]:
    """A controller after many steps that cost what they cost, and its tokens per second beside the best mode's."""
    controller, expected = DraftLengthController(modes_of(fixed, 8)), yields([share], 8)
    tokens = seconds = 0.0
    for _ in range(num_steps):
        cost = costs[controller.mode]
        tokens += expected[controller.mode.num_draft_tokens]
        seconds += cost
        controller.record(cost, controller.mode.num_draft_tokens)
        if controller.is_due:
            controller.choose(expected, draft)
    best = max(expected[mode.num_draft_tokens] / cost for mode, cost in costs.items())
    return controller, tokens / seconds / best


def costs_of(draft: float, verify: float, base: float = 1.0, sync: float = 0.1) -> dict[SpeculationMode, float]:
    found = {PLAIN: base}
    for mode in modes_of(0, 8)[1:]:
        k = mode.num_draft_tokens
        hidden = 0.5 if mode.runs_ahead else 1.0
        found[mode] = base + sync + k * (draft * hidden + verify)
    return found


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize(("draft", "verify"), [(0.01, 0.01), (0.1, 0.02), (0.1, 0.3), (0.5, 0.1), (2.0, 0.5)])
def test_the_choice_is_never_much_worse_than_the_best_arm(draft: float, verify: float, share: float) -> None:
    _, ratio = settled(costs_of(draft, verify), share, draft)
    assert ratio >= 0.97


def test_worthless_drafts_end_in_plain_steps() -> None:
    controller, _ = settled(costs_of(0.5, 0.5), 0.1, 0.5)
    assert controller.mode == PLAIN


def test_the_choice_follows_a_change() -> None:
    controller, expected = DraftLengthController(modes_of(0, 8)), yields([0.8], 8)
    for phase, costs in enumerate((costs_of(3.0, 1.0), costs_of(0.01, 0.01))):
        for _ in range(3000):
            controller.record(costs[controller.mode], controller.mode.num_draft_tokens)
            if controller.is_due:
                controller.choose(expected, 0.0)
        assert (controller.mode == PLAIN) == (phase == 0)


def test_a_fixed_number_stays() -> None:
    controller, _ = settled(costs_of(3.0, 1.0), 0.1, 3.0, fixed=4)
    assert controller.mode == SpeculationMode(4)


def test_expected_tokens() -> None:
    assert yields([0.5], 3) == [1.0, 1.5, 1.75, 1.875]
    assert yields([1.0, 0.0], 2) == [1.0, 1.5, 2.0]
    assert yields([], 1) == [0.0, 0.0]


# -- costs as they are: noisy, drifting, dear at first, with rounds that are not compared in between


NOISE = 0.1  # of a step's time, from one to the next
DRIFTS = ((0.12, 0.15), (0.15, 5.0))  # the same of all modes together, each over so many seconds
FAST, FAST_SECONDS, USUAL_SECONDS = -0.5, 0.1, 0.6  # for so long all is so much faster, and as before for so long
STRAY, STRAY_TIMES = 0.01, 3.0  # of all steps take so many times as long
SLICE = 0.02  # seconds in which speed does not change
COLD = 0.15  # seconds in which the first steps, which take twice as long, come near to what others take
SWITCH = 1.2  # times what a step takes after one of a mode of another kind


class Machine:
    """What steps take on one that others use too."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = self._fast = 0.0
        self._drifts = [self.rng.gauss(0, size) for size, _ in DRIFTS]

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        dwell = FAST_SECONDS if self._fast else USUAL_SECONDS
        if self.rng.random() < seconds / dwell:
            self._fast = 0.0 if self._fast else FAST
        for index, (size, memory) in enumerate(DRIFTS):
            share = min(1.0, seconds / memory)
            self._drifts[index] += -share * self._drifts[index] + self.rng.gauss(0, size) * math.sqrt(2 * share)

    @property
    def slowness(self) -> float:
        return math.exp(self._fast + sum(self._drifts)) * (1 + math.exp(-self.now / COLD))

    def step(self, seconds: float) -> float:
        """What a step takes that is of so many seconds on a quiet machine; then it is over."""
        left = seconds * math.exp(self.rng.gauss(0, NOISE) - NOISE**2 / 2)
        left *= 1 if self.rng.random() > STRAY else STRAY_TIMES
        begin = self.now
        while left > 0:
            took = min(left * self.slowness, SLICE)
            left -= took / self.slowness
            self.pass_by(took)
        return self.now - begin


def noisy(
    costs: dict[SpeculationMode, float], share: float, draft: float, seconds: float, seed: int, each: int
) -> float:
    """Tokens in the second half of so many seconds, beside what the best mode would have made in that time; every
    `each`-th step is not measured.  Costs are milliseconds."""
    machine, expected = Machine(seed), yields([share], 8)
    best_rate = max(expected[mode.num_draft_tokens] / cost for mode, cost in costs.items())
    best_rate *= 1e3
    controller, before = DraftLengthController(list(costs)), PLAIN
    tokens = ideal = 0.0
    while machine.now < seconds:
        if controller.is_due:
            controller.choose(expected, 1e-3 * draft * machine.slowness)
        work = 1e-3 * costs[controller.mode] * (1 if controller.mode.is_like(before) else SWITCH)
        took, before = machine.step(work), controller.mode
        if machine.now > seconds / 2:
            tokens, ideal = tokens + expected[controller.mode.num_draft_tokens], ideal + work * best_rate
        if machine.rng.random() > 1 / each:
            controller.record(took, controller.mode.num_draft_tokens)
    return tokens / ideal


def straight(plain: float, waiting: tuple[float, float], ahead: tuple[float, float]) -> dict[SpeculationMode, float]:
    """Costs that rise by so much with each draft token, from so much."""
    lines = {False: waiting, True: ahead}
    drafting = {
        mode: lines[mode.runs_ahead][0] + lines[mode.runs_ahead][1] * mode.num_draft_tokens for mode in modes_of(0, 8)
    }
    return drafting | {PLAIN: plain}


# Milliseconds, as measured on two cores with the bundled pair at so many streams, with the made one, and a bad draft.
MEASURED = {
    "1": (straight(1.64, (3.4, 0.21), (3.9, 0.25)), 0.77, 60),
    "2": (straight(1.87, (3.5, 0.33), (3.9, 0.50)), 0.77, 30),
    "4": (straight(2.35, (4.3, 0.54), (4.8, 0.70)), 0.77, 20),
    "8": (straight(3.77, (6.6, 0.93), (7.2, 1.10)), 0.77, 12),
    "16": (straight(5.70, (10.3, 1.60), (11.0, 1.80)), 0.77, 8),
    "32": (straight(8.60, (14.5, 3.00), (15.0, 3.30)), 0.77, 6),
    "made": (straight(190.0, (205.0, 4.0), (205.0, 2.5)), 0.8, 100),
    "bad": (straight(5.0, (7.0, 2.0), (8.0, 2.0)), 0.2, 20),
}


@pytest.mark.parametrize("name", MEASURED)
def test_noise_does_not_mislead(name: str) -> None:
    costs, share, each = MEASURED[name]
    draft = 0.6 * (costs[SpeculationMode(2)] - costs[SpeculationMode(1)])  # the rest is the target's
    seconds = 400.0 if name == "made" else 20.0
    ratios = [noisy(costs, share, draft, seconds, seed, each) for seed in range(16)]
    assert mean(ratios) >= 0.95, ratios
    assert min(ratios) >= 0.85, ratios


def test_drafts_that_were_not_there_yet_are_tried_again() -> None:
    costs, expected = costs_of(0.01, 0.01), yields([0.8], 8)
    controller, draft_begins = DraftLengthController(modes_of(0, 8)), 60
    for step in range(2000):
        controller.record(costs[controller.mode], controller.mode.num_draft_tokens if step >= draft_begins else 0.0)
        if controller.is_due:
            controller.choose(expected, 0.0)
    assert controller.mode.num_draft_tokens == 8
    assert all(cost.depth > 0 for mode, cost in controller.costs.items() if cost.num_trials and mode != PLAIN)


def test_steps_are_plain_while_there_are_no_drafts() -> None:
    """A trial in which none came shows nothing, and is not repeated at once; once drafts come that is soon noticed."""
    costs, expected = costs_of(0.01, 0.01), yields([0.8], 8)
    controller, draft_begins, num_steps = DraftLengthController(modes_of(0, 8)), 8000, 0
    for step in range(draft_begins + 500):
        num_steps += controller.mode != PLAIN and step < draft_begins
        controller.record(costs[controller.mode], controller.mode.num_draft_tokens if step >= draft_begins else 0.0)
        if controller.is_due:
            controller.choose(expected, 0.0)
    assert num_steps < 0.15 * draft_begins
    assert controller.mode.num_draft_tokens == 8


def test_what_others_cost_is_forgotten_after_surprises_in_turn_and_each_time_anew() -> None:
    controller, other = DraftLengthController(modes_of(0, 8)), SpeculationMode(2)
    controller._num_compared = 5
    for _ in range(2):
        for num_surprises in range(1, SURPRISES + 1):
            controller.costs[other].add(1.0, 2.0, weight=1)
            controller._end_probe(PLAIN, is_surprise=True)
            assert (controller.costs[other].num_trials == 0) == (num_surprises == SURPRISES)
    assert controller._num_compared == 0


def test_a_measured_arm_tells_of_its_neighbours() -> None:
    costs = {mode: Cost() for mode in modes_of(0, 8)}
    for mode, seconds in {PLAIN: 1.0, SpeculationMode(2): 2.2, SpeculationMode(8): 2.8}.items():
        costs[mode].add(seconds, mode.num_draft_tokens, weight=15)
    found = believed(costs, 0.01)
    assert found[SpeculationMode(4)] == pytest.approx(2.4, rel=0.01)
    assert found[PLAIN] == 1.0


def test_a_batch_that_lacks_a_few_is_of_the_same_size() -> None:
    assert [size_of(n) for n in (1, 2, 3, 4, 5, 6, 8, 11)] == [1, 2, 3, 3, 3, 4, 4, 4]
    assert len({size_of(n) for n in range(24, 48)}) == 1
    assert [size_of(length) for length in LENGTHS] == list(range(1, 1 + len(LENGTHS)))


def test_the_most_that_is_allowed_is_an_arm_too() -> None:
    assert [mode.num_draft_tokens for mode in modes_of(0, 6)] == [0, 1, 2, 4, 6, 1, 2, 4, 6]
    assert [mode.num_draft_tokens for mode in modes_of(0, 1)] == [0, 1, 1]
    assert [mode.num_draft_tokens for mode in modes_of(0, 64)][:8] == [0, 1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(("place", "value"), [(0.0, 1.0), (0.5, 1.5), (2.0, 4.0), (2.5, 4.0), (7.0, 4.0)])
def test_beyond_the_last_value_there_is_the_last(place: float, value: float) -> None:
    assert between([1.0, 2.0, 4.0], place) == value
