"""Percentiles and other figures of a set of values."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """Of a set of values, in their own unit; `percentiles` by q.  All NaN where there are no values."""

    count: int
    mean: float
    std: float  # of the population
    percentiles: dict[float, float]

    @property
    def median(self) -> float:
        return self.percentiles[50.0]


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 ... 100) by linear interpolation between order statistics; NaN of nothing."""
    return _interpolate(sorted(values), range(1, len(values) + 1), q)


def summarise(values: Iterable[float], qs: Iterable[float] = (90.0, 99.0)) -> Summary:
    """Mean, deviation and percentiles, the median always among them."""
    ordered = sorted(values)
    return _summary(ordered, [1] * len(ordered), qs)


class Tally:
    """Counts of values rounded to a step: memory that does not grow with their number.

    All figures are those of the rounded values, so mean and percentiles are within half a step of the true ones.
    """

    def __init__(self, step: float = 1e-5) -> None:
        self.step = step
        self._per_step = 1 / step
        self._counts: dict[int, int] = {}

    def add(self, value: float, times: int = 1) -> None:
        key = int(value * self._per_step + 0.5)
        self._counts[key] = self._counts.get(key, 0) + times

    @property
    def count(self) -> int:
        return sum(self._counts.values())

    def summary(self, qs: Iterable[float] = (90.0, 99.0)) -> Summary:
        """As `summarise`, of what was added."""
        keys = sorted(self._counts)
        return _summary([key * self.step for key in keys], [self._counts[key] for key in keys], qs)

    def items(self) -> Counter[float]:
        """Rounded values and how often each came."""
        return Counter({key * self.step: count for key, count in self._counts.items()})


def _summary(values: Sequence[float], counts: Sequence[int], qs: Iterable[float]) -> Summary:
    """Of values in order, each of which came so many times."""
    ends = list(accumulate(counts))
    percentiles = {q: _interpolate(values, ends, q) for q in sorted({50.0, *map(float, qs)})}
    if not values:
        return Summary(0, math.nan, math.nan, percentiles)
    mean = math.fsum(map(mul, values, counts)) / ends[-1]
    variance = math.fsum(count * (value - mean) ** 2 for value, count in zip(values, counts, strict=True)) / ends[-1]
    return Summary(ends[-1], mean, math.sqrt(variance), percentiles)


def _interpolate(values: Sequence[float], ends: Sequence[int], q: float) -> float:
    """`ends`: how many there are up to each value."""
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile must be in [0, 100], got {q}")
    if not values:
        return math.nan
    position = (ends[-1] - 1) * q / 100
    low = int(position)
    below, above = (values[bisect_right(ends, rank)] for rank in (low, min(low + 1, ends[-1] - 1)))
    return below + (position - low) * (above - below)
