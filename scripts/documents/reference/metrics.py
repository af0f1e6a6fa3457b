"""metrics.md: every family that the collectors of shared/exposition yield."""

from __future__ import annotations

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from scripts.documents.reference.markdown import code, page, section, table
from shared.exposition import (
    BatchMeter,
    EngineCollector,
    ProcessState,
    RequestMeter,
    ServiceCollector,
    Shelf,
    StoreCollector,
    StoreState,
)
from shared.exposition.requests import HISTOGRAMS
from shared.messages import Load, Member, ServiceName, WorkerLoad
from shared.metrics.histogram import STEP_TOKENS

TEXT = """\
Names that begin with `vllm:` are vLLM's, with its labels. Counters end in `_total`; the samples of a histogram end
in `_bucket`, `_sum` and `_count`. [Metrics](../metrics.md) says where they are served and how to read them."""
HEAD = ("name", "kind", "labels", "meaning")
SCHEDULER = "Served by the scheduler on `metrics_port`, and by each gateway at `/metrics` of its HTTP port."
GATEWAY = "Served by each gateway, on `metrics_port` and at `/metrics` of its HTTP port."
BATCHES = "Served by each gateway that has `files_dir`, with its other metrics; one of them runs the batches."
STORE = "Served by each store on `metrics_port`."
EVERY = "Served by each service on `metrics_port`, with `process_*` and `python_info` of the Prometheus client library."
BUCKETS = "Upper bounds of the buckets"


def render() -> str:
    return page(
        "Metrics",
        "the collectors of shared/exposition",
        TEXT,
        section("The scheduler", SCHEDULER, _table(EngineCollector("m", _load()))),
        section("A gateway", GATEWAY, _table(_meter())),
        section("Batches", BATCHES, _table(BatchMeter("m"))),
        section("A store", STORE, _table(StoreCollector(_store()))),
        section("Every service", EVERY, _table(ServiceCollector(_state()))),
        section(BUCKETS, table(("histogram", "bounds"), _bounds())),
    )


def _table(collector: Collector) -> str:
    return table(HEAD, (_row(family) for family in collector.collect()))


def _row(family: Metric) -> tuple[str, ...]:
    labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return (code(name), family.type, ", ".join(map(code, labels)), family.documentation)


def _bounds() -> list[tuple[str, str]]:
    found = [(code(name), bounds) for name, _, bounds in HISTOGRAMS.values()]
    found.append((code("vllm:iteration_tokens_total"), STEP_TOKENS))
    return [(name, ", ".join(f"{bound:g}" for bound in bounds)) for name, bounds in found]


# One sample of every label, so that all labels are seen.


def _load() -> Load:
    worker = WorkerLoad("w", 0, 0, 0, 0, 0, "fp")
    return Load("", 0, 0, [worker], 0, 0, 0, 0, 0, 0, 0, 0, 0, num_accepted_tokens_per_position=[0])


def _meter() -> RequestMeter:
    meter = RequestMeter("m")
    meter.failures["status"] += 1
    meter.spent({"prefill": 1.0})
    meter.missed({"evicted": 1})
    return meter


def _store() -> StoreState:
    return StoreState("s", {"memory": Shelf(0, 0, 0, 0), "disk": Shelf(0, 0, 0, 0)}, 0)


def _state() -> ProcessState:
    members = [Member(ServiceName.WORKER, "w", "", 1)]
    return ProcessState("worker", "w", 0.0, 0, 0, 0, "READY", False, members, {"log": 1})
