"""What a gateway measures of the batches that it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shared.exposition.engine import ENGINE
from shared.exposition.families import Families

OUTCOMES = ("completed", "failed", "retried")
STATUSES = ("completed", "failed", "expired", "cancelled")


class BatchMeter(Collector):
    """Filled by the runner; read at every scrape."""

    def __init__(self, model: str) -> None:
        self._families = Families(model_name=model, engine=ENGINE)
        self.is_runner = False
        self.num_batches = 0
        self.num_lines = 0
        self.lines: Counter[str] = Counter()  # by outcome
        self.batches: Counter[str] = Counter()  # by the status that they ended with

    def collect(self) -> Iterator[Metric]:
        make = self._families
        yield make.gauge("pageant_batch_runner", "1 at the gateway that runs the batches.", self.is_runner)
        yield make.gauge("pageant_batches_open", "Batches that this gateway runs.", self.num_batches)
        yield make.gauge("pageant_batch_lines_running", "Requests of batches that run now.", self.num_lines)
        yield make.counter(
            "pageant_batch_lines",
            "Requests of batches, by outcome; one that is retried comes again.",
            [({"outcome": outcome}, self.lines[outcome]) for outcome in OUTCOMES],
        )
        yield make.counter(
            "pageant_batches",
            "Batches that ended, by status.",
            [({"status": status}, self.batches[status]) for status in STATUSES],
        )
