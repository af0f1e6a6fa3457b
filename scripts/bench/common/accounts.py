"""What the services themselves say of the requests of one run: the gateway's log and its /metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.request import urlopen

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from shared.metrics import Summary, summarise
from shared.metrics.histogram import ITL, Histogram, quantile

FAMILY = "vllm:inter_token_latency_seconds"
Buckets = list[tuple[float, float]]  # upper bound, how many values up to it
QS = (50.0, 90.0, 99.0)


class GatewayScrape(msgspec.Struct, frozen=True):
    """The histogram of the gaps between outputs, as one look at /metrics shows it; seconds."""

    buckets: Buckets
    sum: float

    def since(self, before: GatewayScrape) -> GatewayScrape:
        """What came after another look."""
        pairs = zip(self.buckets, before.buckets, strict=True)
        return GatewayScrape([(bound, now - then) for (bound, now), (_, then) in pairs], self.sum - before.sum)

    @property
    def mean(self) -> float:
        return self.sum / self.buckets[-1][1] if self.buckets[-1][1] else 0.0

    def percentile(self, q: float) -> float:
        return quantile(self.buckets, q / 100) or 0.0


def scrape(base_url: str) -> GatewayScrape:
    """Raises OSError where nobody answers, ValueError where the histogram is not there."""
    with urlopen(f"{base_url}/metrics", timeout=10) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    if FAMILY not in families:
        raise ValueError(f"{base_url}/metrics has no {FAMILY}")
    samples = families[FAMILY].samples
    buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name.endswith("_bucket")]
    return GatewayScrape(buckets, next(s.value for s in samples if s.name.endswith("_sum")))


def bucketed(gaps: Iterable[float]) -> GatewayScrape:
    """A client's gaps as the services would have counted them: percentiles of both are then cut alike."""
    histogram = Histogram(ITL)
    for gap in gaps:
        histogram.observe(gap)
    return GatewayScrape([(float(bound), float(count)) for bound, count in histogram.cumulative()], histogram.sum)


class GatewayAccount(msgspec.Struct, frozen=True):
    """One run by the services' own clocks; seconds."""

    ttft: Summary
    e2el: Summary
    itl: GatewayScrape


class Accounts:
    """Reads what was added since it was last asked."""

    def __init__(self, gateway_log: Path, base_url: str) -> None:
        self._log: BinaryIO = gateway_log.open("rb")
        self._base_url = base_url
        self._seen = scrape(base_url)
        self.take()

    def take(self) -> GatewayAccount:
        """Of the requests that have ended well since the last call."""
        ended = _finished(self._log.readlines())
        seen, self._seen = self._seen, scrape(self._base_url)
        return GatewayAccount(
            ttft=summarise((line["ttft_ms"] / 1000 for line in ended), QS),
            e2el=summarise((line["e2e_ms"] / 1000 for line in ended), QS),
            itl=self._seen.since(seen),
        )

    def close(self) -> None:
        self._log.close()


def _finished(lines: Sequence[bytes]) -> list[dict[str, float]]:
    """The log's lines of requests that ended well.  What is no JSON is somebody else's."""
    events = (json.loads(line) for line in lines if line.startswith(b"{"))
    return [event for event in events if event.get("event") == "request_finished"]
