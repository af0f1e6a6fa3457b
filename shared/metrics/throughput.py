"""Rates over a run, and its busiest moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def rate(count: float, seconds: float) -> float:
    """Per second: requests give RPS (QPS), tokens give TPS; 0 where no time has passed."""
    return count / seconds if seconds > 0 else 0.0


def per_minute(count: float, seconds: float) -> float:
    """Per minute: requests give QPM."""
    return 60 * rate(count, seconds)


def serial_rate(latencies: Iterable[float]) -> float:
    """QPS of a client that asks one at a time: requests / sum of their latencies (seconds)."""
    listed = list(latencies)
    return rate(len(listed), sum(listed))


def peak_rate(events: Iterable[tuple[float, int]], window: float = 1.0) -> float:
    """The largest count per second among windows of the run laid end to end from time 0; events are (time, count)."""
    buckets: Counter[int] = Counter()
    for time, count in events:
        buckets[int(time // window)] += count
    return max(buckets.values(), default=0) / window


def peak_concurrency(spans: Iterable[tuple[float, float]]) -> int:
    """The most (start, end) spans that were open at one moment; one that ends as another starts leaves it room."""
    changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
    highest = now = 0
    for _, change in changes:
        now += change
        highest = max(highest, now)
    return highest
