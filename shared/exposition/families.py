"""How a metric family is made, with the labels that all of one server's share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from shared.metrics.histogram import Histogram

Sample = tuple[Mapping[str, str], float]


class Families:
    """Makes families whose samples all have these labels, and some of their own."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self.gauges(name, text, [({}, value)])

    def counter(self, name: str, text: str, value: float) -> Metric:
        return self.counters(name, text, [({}, value)])

    def gauges(self, name: str, text: str, samples: Iterable[Sample], *own: str) -> Metric:
        """`own`: the names of the labels that the samples add."""
        return self._filled(GaugeMetricFamily(name, text, labels=self._names(own)), samples, own)

    def counters(self, name: str, text: str, samples: Iterable[Sample], *own: str) -> Metric:
        """`name` without the `_total` that the text has."""
        return self._filled(CounterMetricFamily(name, text, labels=self._names(own)), samples, own)

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=self._names(()))
        family.add_metric(list(self._labels.values()), list(histogram.cumulative()), histogram.sum)
        return family

    def _names(self, own: Iterable[str]) -> list[str]:
        return [*self._labels, *own]

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample], own: Iterable[str]
    ) -> Metric:
        names = list(own)
        for labels, value in samples:
            family.add_metric([*self._labels.values(), *(labels[name] for name in names)], float(value))
        return family
