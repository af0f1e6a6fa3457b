"""What a soak makes of its samples: growth after the first third, and a verdict."""

from __future__ import annotations

from random import Random

import pytest

from scripts.bench.soak.growth import MIB, Curve, lines
from scripts.bench.soak.visits import KINDS


def curve(size: object) -> Curve:
    made = Curve()
    for second in range(0, 1801, 5):
        made.add(second, int(size(second) * MIB))  # type: ignore[operator]
    return made


def test_what_fills_up_in_the_first_third_does_not_grow() -> None:
    filling = curve(lambda second: 40 + min(second, 500) / 50)
    assert filling.growth == pytest.approx(0.0) and filling.slope == pytest.approx(0.0)
    assert not lines([("scheduler", filling)], 5.0)[0].missed


def test_what_goes_on_growing_is_found_although_samples_jump() -> None:
    rng = Random(1)
    leaking = curve(lambda second: 40 + second / 300 + rng.choice((0, 0, 0, 6)))
    assert leaking.growth == pytest.approx(9.5, abs=1.5)
    assert leaking.slope / MIB == pytest.approx(12, abs=5)
    (line,) = lines([("gateway", leaking)], 5.0)
    assert line.missed and "MiB/h" in line.note


def test_one_sample_is_enough_to_say_something() -> None:
    short = Curve()
    short.add(0.0, MIB)
    assert (short.growth, short.slope) == (0.0, 0.0)


def test_kinds_are_shares_of_a_hundred() -> None:
    assert sum(KINDS.values()) == 100
