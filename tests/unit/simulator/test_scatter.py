"""Steps that scatter: as widely as those that were recorded, each size as its like, and the same every time."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from services.simulator.fitting import fit
from services.simulator.scatter import MIN_ALIKE, Scattered
from shared.metrics import percentile
from shared.metrics.steps import RecordedStep, StepWork

SMALL, LARGE = range(1, 9), range(200, 400)  # tokens


def step(rng: Random, num_tokens: int, noise: float) -> RecordedStep:
    seconds = (0.004 + 0.0001 * num_tokens) * rng.lognormvariate(0.0, noise)
    context = rng.randrange(100, 1000)
    return RecordedStep(num_tokens, 1, 1, context, context * num_tokens, 0.0, seconds)


def recorded(seed: int = 1) -> list[RecordedStep]:
    """Many small steps that scatter little, fewer large ones that scatter much."""
    rng = Random(seed)
    small = [step(rng, rng.choice(SMALL), 0.02) for _ in range(600)]
    return small + [step(rng, rng.choice(LARGE), 0.3) for _ in range(200)]


def spread(model: Scattered, steps: list[RecordedStep]) -> float:
    """How far the slowest twentieth lies above the median, of what the steps would take without noise."""
    ratios = [model.seconds(one.work) / (0.004 + 0.0001 * one.num_tokens) for one in steps]
    return percentile(ratios, 95) / percentile(ratios, 50)


def test_steps_scatter_as_their_like_did() -> None:
    steps, others = recorded(), recorded(2)
    model = Scattered(fit(steps), steps)
    small = [one for one in others if one.num_tokens in SMALL]
    large = [one for one in others if one.num_tokens in LARGE]
    assert spread(model, small) == pytest.approx(1.033, abs=0.02)
    assert spread(model, large) == pytest.approx(1.64, abs=0.25)


def test_in_all_they_take_as_long_as_steps_did_times_the_factor() -> None:
    """A fit of relative errors lies below the mean where steps scatter; what is drawn does not."""
    steps, others = recorded(), recorded(3)
    plain, scattered = fit(steps), Scattered(fit(steps), steps, 1.5)
    total = sum(one.seconds for one in others)
    assert sum(scattered.seconds(one.work) for one in others) == pytest.approx(1.5 * total, rel=0.05)
    assert sum(plain.seconds(one.work) for one in others) < 0.95 * total


def test_the_same_work_takes_the_same_time_and_other_work_another() -> None:
    steps = recorded()
    model, again = Scattered(fit(steps), steps), Scattered(fit(steps), steps)
    works = [StepWork(4, 4, 4, context, context) for context in range(1000, 1100)]
    assert [model.seconds(work) for work in works] == [again.seconds(work) for work in reversed(works)][::-1]
    assert len({round(model.seconds(work), 7) for work in works}) > 20


def test_sizes_of_which_too_few_were_recorded_scatter_as_their_neighbours() -> None:
    rng = Random(4)
    few = [step(rng, 300 + index, 0.0) for index in range(MIN_ALIKE - 5)]
    small = [step(rng, rng.choice(SMALL), 0.1) for _ in range(400)]
    model = Scattered(fit(small + few), small + few)
    works = [msgspec.structs.replace(one.work, num_context=900 + index) for index, one in enumerate(few)]
    plain = fit(small + few)
    assert len({round(model.seconds(work) / plain.seconds(work), 6) for work in works}) > 3
