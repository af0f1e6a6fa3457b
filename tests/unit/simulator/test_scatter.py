"""Steps that scatter: as widely as those that were recorded, each size as its like, and the same every time."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from services.simulator.fitting import MIN_ALIKE, Scattered, fit
from shared.metrics import percentile
from shared.metrics.steps import RecordedStep, StepWork

SMALL, LARGE = range(1, 9), range(200, 400)  # tokens


def step(rng: Random, num_tokens: int, noise: float, start: float = 0.0) -> RecordedStep:
    seconds = (0.004 + 0.0001 * num_tokens) * rng.lognormvariate(0.0, noise)
    context = rng.randrange(100, 1000)
    return RecordedStep(num_tokens, 1, 1, context, context * num_tokens, start, seconds)


def recorded(seed: int = 1) -> list[RecordedStep]:
    """Many small steps that scatter little, fewer large ones that scatter much, in any order."""
    rng = Random(seed)
    steps = [step(rng, rng.choice(SMALL), 0.02) for _ in range(600)]
    steps += [step(rng, rng.choice(LARGE), 0.3) for _ in range(200)]
    rng.shuffle(steps)
    return one_after_another(steps)


def one_after_another(steps: list[RecordedStep]) -> list[RecordedStep]:
    start, placed = 5.0, []
    for each in steps:
        placed.append(msgspec.structs.replace(each, start=start))
        start += each.seconds
    return placed


def spread(model: Scattered, steps: list[RecordedStep]) -> float:
    """How far the slowest twentieth lies above the median, of what the steps would take without noise."""
    ratios = [model.seconds(one.work, one.start) / (0.004 + 0.0001 * one.num_tokens) for one in steps]
    return percentile(ratios, 95) / percentile(ratios, 50)


def test_steps_scatter_as_their_like_did() -> None:
    steps, others = recorded(), recorded(2)
    model = Scattered(fit(steps), steps)
    small = [one for one in others if one.num_tokens in SMALL]
    large = [one for one in others if one.num_tokens in LARGE]
    assert spread(model, small) == pytest.approx(1.033, abs=0.02)
    assert spread(model, large) == pytest.approx(1.64, abs=0.25)


def test_in_all_they_take_as_long_as_steps_did_times_the_factor() -> None:
    """As a fit alone does, whose errors are relative to what it foretells: slow steps count in full."""
    steps, others = recorded(), recorded(3)
    plain, scattered = fit(steps), Scattered(fit(steps), steps, 1.5)
    total = sum(one.seconds for one in others)
    assert sum(scattered.seconds(one.work, one.start) for one in others) == pytest.approx(1.5 * total, rel=0.05)
    assert sum(plain.seconds(one.work) for one in others) == pytest.approx(total, rel=0.05)


def test_the_same_step_takes_the_same_time_and_at_another_time_another() -> None:
    steps = recorded()
    model, again = Scattered(fit(steps), steps), Scattered(fit(steps), steps)
    work, starts = StepWork(4, 4, 4, 1000, 1000), [0.01 * number for number in range(100)]
    assert [model.seconds(work, start) for start in starts] == [again.seconds(work, start) for start in starts]
    assert len({round(model.seconds(work, start), 7) for start in starts}) > 20
    assert model.seconds(work, 0.5, worker=1) != model.seconds(work, 0.5), "each worker has slow moments of its own"


def test_slow_steps_come_together_as_they_did_and_come_again() -> None:
    """A second of which the middle was slow, for small steps and large ones."""
    rng, steps = Random(7), []
    for number in range(400):
        slowness = 3.0 if 150 <= number < 250 else 1.0
        made = step(rng, rng.choice(SMALL if number % 3 else LARGE), 0.01)
        steps.append(msgspec.structs.replace(made, seconds=slowness * made.seconds))
    steps = one_after_another(steps)
    begin, slow, quick, end = (steps[number].start - steps[0].start for number in (0, 150, 250, 399))
    model, plain = Scattered(fit(steps), steps), fit(steps)

    def ratio(num_tokens: int, start: float) -> float:
        work = StepWork(num_tokens, 1, 1, 500, 500 * num_tokens)
        return model.seconds(work, start) / plain.seconds(work)

    for again in (0.0, end):
        for num_tokens in (5, 300):
            usual = ratio(num_tokens, again + (begin + slow) / 2)
            assert ratio(num_tokens, again + (slow + quick) / 2) > 2 * usual
            assert ratio(num_tokens, again + (quick + end) / 2) == pytest.approx(usual, rel=0.4)


def test_a_pause_in_the_recording_is_no_time() -> None:
    steps = recorded()
    late = [msgspec.structs.replace(each, start=each.start + (3600.0 if place > 400 else 0.0))
            for place, each in enumerate(steps)]  # fmt: skip
    with_pause, without = Scattered(fit(steps), late), Scattered(fit(steps), steps)
    assert without._span < with_pause._span < without._span + 1.0


def test_sizes_of_which_too_few_were_recorded_scatter_as_their_neighbours() -> None:
    rng = Random(4)
    few = [step(rng, 300 + index, 0.0) for index in range(MIN_ALIKE - 5)]
    small = [step(rng, rng.choice(SMALL), 0.1) for _ in range(400)]
    model = Scattered(fit(small + few), one_after_another(small + few))
    plain = fit(small + few)
    ratios = {round(model.seconds(one.work, 0.1 * place) / plain.seconds(one.work), 6) for place, one in enumerate(few)}
    assert len(ratios) > 3


def test_a_short_recording_of_a_busy_machine_foretells_no_step_that_takes_no_time() -> None:
    """Large steps that by chance took less than small ones let a line through both fall below zero."""
    small = [RecordedStep(1, 1, 1, 0, 0, 0.0, 0.1) for _ in range(40)]
    large = [RecordedStep(40 + index % 8, 1, 1, 0, 0, 0.0, 1e-3) for index in range(40)]
    steps = one_after_another([*small, *large])
    model = Scattered(fit(steps), steps)
    assert all(model.seconds(one.work, one.start) > 0 for one in steps)
    assert model.seconds(StepWork(1000, 1, 1, 0, 0)) > 0
