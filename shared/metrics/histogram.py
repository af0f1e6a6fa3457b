"""Counts of values by bucket, as Prometheus takes them; and the buckets that the ecosystem's dashboards expect."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

# vLLM's, so that its dashboards' quantiles mean the same here.  Seconds, then tokens.
E2E = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
       1920.0, 7680.0)  # fmt: skip
# The queue's are finer below: where nothing waits, a request is admitted within a millisecond.
QUEUE = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *E2E)
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0)  # fmt: skip
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_SEQUENCES = (1, 2, 5, 10, 20)
NUM_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))


class Histogram:
    """Values up to and including each bound; memory and time do not grow with their number."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last one: beyond all bounds
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """(upper bound, how many values up to it), the last one for "+Inf"."""
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            yield ("+Inf" if bound == float("inf") else str(float(bound))), seen


def quantile(buckets: Sequence[tuple[float, float]], q: float) -> float | None:
    """The q-quantile (0 ... 1) of cumulative (bound, count) pairs, linear within a bucket as Prometheus does it.

    None of nothing; the last finite bound where it lies beyond that.
    """
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    low = before = 0.0
    for bound, count in buckets:
        if count >= q * total:
            if bound == float("inf"):
                return low
            return low + (bound - low) * ((q * total - before) / (count - before) if count > before else 0.0)
        low, before = bound, count
    return low
