"""How a metric family is made, with the labels that all of one server's share; and the text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shared.metrics.histogram import Histogram

Sample = tuple[Mapping[str, str], float]  # own labels and value


def exposition(*collectors: Collector) -> bytes:
    """All of these at this moment, in the text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Together(collectors))
    return generate_latest(registry)


class Together(Collector):
    """Several collectors as one: a family that several have, as of several models, is written once."""

    def __init__(self, collectors: Iterable[Collector]) -> None:
        self._collectors = tuple(collectors)

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for metric in (metric for collector in self._collectors for metric in collector.collect()):
            if (known := found.get(metric.name)) is None:
                found[metric.name] = metric
            else:
                known.samples += metric.samples
        return found.values()


class Families:
    """Makes families whose samples all have these labels, and some of their own."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels

    def gauge(self, name: str, text: str, samples: float | Iterable[Sample]) -> Metric:
        """`samples`: one value, or several with labels of their own."""
        return self._family("gauge", name, "", text, samples)

    def counter(self, name: str, text: str, samples: float | Iterable[Sample]) -> Metric:
        """`name` without the `_total` of its samples."""
        return self._family("counter", name, "_total", text, samples)

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = Metric(name, text, "histogram")
        for bound, count in histogram.cumulative():
            family.add_sample(f"{name}_bucket", {**self._labels, "le": bound}, count)
        family.add_sample(f"{name}_count", self._labels, histogram.count)
        family.add_sample(f"{name}_sum", self._labels, histogram.sum)
        return family

    def _family(self, kind: str, name: str, suffix: str, text: str, samples: float | Iterable[Sample]) -> Metric:
        family = Metric(name, text, kind)
        for own, value in [({}, samples)] if isinstance(samples, int | float) else samples:
            family.add_sample(name + suffix, {**self._labels, **own}, float(value))
        return family
