"""Percentiles and what is said of a set of values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 ... 100) by linear interpolation between order statistics; NaN of nothing."""
    return _interpolate(sorted(values), q)


class Summary(msgspec.Struct, frozen=True):
    """Of a set of values, in their own unit; `percentiles` by q.  All NaN where there are no values."""

    count: int
    mean: float
    std: float  # of the population
    percentiles: dict[float, float]

    @property
    def median(self) -> float:
        return self.percentiles[50.0]


def summarise(values: Iterable[float], qs: Iterable[float] = (90.0, 99.0)) -> Summary:
    """Mean, deviation and percentiles, the median always among them."""
    ordered = sorted(values)
    percentiles = {q: _interpolate(ordered, q) for q in sorted({50.0, *map(float, qs)})}
    if not ordered:
        return Summary(0, math.nan, math.nan, percentiles)
    mean = math.fsum(ordered) / len(ordered)
    variance = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)
    return Summary(len(ordered), mean, math.sqrt(variance), percentiles)


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
        wanted, count = sorted({50.0, *map(float, qs)}), self.count
        percentiles = {q: self.percentile(q) for q in wanted}
        if not count:
            return Summary(0, math.nan, math.nan, percentiles)
        mean = math.fsum(value * times for value, times in self.items().items()) / count
        variance = math.fsum(times * (value - mean) ** 2 for value, times in self.items().items()) / count
        return Summary(count, mean, math.sqrt(variance), percentiles)

    def percentile(self, q: float) -> float:
        """As the function of that name; NaN where nothing was added."""
        count = self.count
        if not count:
            return math.nan
        position = (count - 1) * q / 100
        low, fraction = int(position), position - int(position)
        below, above = self._at(low), self._at(min(low + 1, count - 1))
        return (below + fraction * (above - below)) * self.step

    def _at(self, rank: int) -> int:
        """The key at this place among all values in order."""
        seen = 0
        for key in sorted(self._counts):
            seen += self._counts[key]
            if seen > rank:
                return key
        raise IndexError(rank)

    def items(self) -> Counter[float]:
        """Rounded values and how often each came."""
        return Counter({key * self.step: count for key, count in self._counts.items()})


def _interpolate(ordered: Sequence[float], q: float) -> float:
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile must be in [0, 100], got {q}")
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    above = ordered[min(low + 1, len(ordered) - 1)]
    return ordered[low] + (position - low) * (above - ordered[low])
