"""When requests arrive: seconds after the start, in order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from random import Random
from typing import Literal

import msgspec


class Ramp(msgspec.Struct, frozen=True):
    """A rate that grows from the first request to the last, in requests per second."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def rate_at(self, progress: float) -> float:
        """The rate when this share (0 ... 1) of the requests has been sent."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * math.pow(self.end / self.start, progress)


def arrival_times(count: int, rate: float, burstiness: float, rng: Random) -> list[float]:
    """`count` times at `rate` per second.

    rate inf: all at once.  Gaps are gamma distributed with shape `burstiness` and mean 1 / rate: 1 is a Poisson
    process, less is burstier, inf has constant gaps.  As vLLM's `bench serve` does it, the times are then stretched so
    that the last one is count / rate: every run has exactly the rate that was asked for.
    Raises ValueError unless both numbers are positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"rate and burstiness must be positive, got {rate} and {burstiness}")
    if math.isinf(rate):
        return [0.0] * count
    times = list(accumulate(_gap(rate, burstiness, rng) for _ in range(count)))
    return _stretched(times, count / rate)


def ramp_times(count: int, ramp: Ramp, burstiness: float, rng: Random) -> list[float]:
    """`count` times whose rate follows a ramp; the gap before each is drawn at the rate of its place."""
    if not min(ramp.start, ramp.end, burstiness) > 0:
        raise ValueError(f"rates and burstiness must be positive, got {ramp} and {burstiness}")
    last = max(count - 1, 1)
    return list(accumulate(_gap(ramp.rate_at(index / last), burstiness, rng) for index in range(count)))


def _gap(rate: float, burstiness: float, rng: Random) -> float:
    if math.isinf(burstiness):
        return 1 / rate
    return rng.gammavariate(burstiness, 1 / (rate * burstiness))


def _stretched(times: Iterable[float], last: float) -> list[float]:
    listed = list(times)
    factor = last / listed[-1] if listed and listed[-1] > 0 else 1.0
    return [time * factor for time in listed]
