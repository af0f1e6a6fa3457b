"""/metrics: what the scheduler counts and what this gateway holds, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.messages import Load

GAUGES = {
    "num_running": ("num_requests_running", "Sequences that take part in steps."),
    "num_waiting": ("num_requests_waiting", "Sequences that wait to be admitted."),
    "kv_cache_usage": ("kv_cache_usage_ratio", "Share of the KV blocks that hold running sequences, from 0 to 1."),
}
COUNTERS = {
    "num_preemptions": ("num_preemptions", "Sequences that were preempted."),
    "num_prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "num_prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_chunked_prefills": ("chunked_prefills", "Prompts that were computed in pieces."),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "num_output_tokens": ("generation_tokens", "Tokens generated."),
    "num_finished": ("requests_finished", "Requests that came to their end."),
    "num_aborted": ("requests_aborted", "Requests that were aborted."),
    "num_rejected": ("requests_rejected", "Requests that were refused."),
    "num_block_copies": ("block_copies", "KV blocks that were copied on write."),
    "num_drafts": ("spec_decode_drafts", "Times that draft tokens were verified."),
    "num_draft_tokens": ("spec_decode_draft_tokens", "Draft tokens that were verified."),
    "num_accepted_tokens": ("spec_decode_accepted_tokens", "Draft tokens that were accepted."),
}
WORKER_GAUGES = {
    "num_running": ("worker_requests_running", "Sequences with a row in this worker."),
    "num_blocks": ("worker_kv_blocks", "KV blocks of this worker."),
    "num_free_blocks": ("worker_kv_blocks_free", "KV blocks without contents."),
    "num_cached_blocks": ("worker_kv_blocks_cached", "KV blocks that are free, with contents worth keeping."),
}


class LoadCollector(Collector):
    """The metrics of one moment.  Without a `load`, when no scheduler answers, those of the gateway alone."""

    def __init__(self, model: str, load: Load | None, num_open_streams: int) -> None:
        self._model = model
        self._load = load
        self._num_open_streams = num_open_streams

    def collect(self) -> Iterator[Metric]:
        yield self._metric(GaugeMetricFamily, "gateway_open_streams", "Open streams here.", self._num_open_streams)
        yield self._metric(GaugeMetricFamily, "scheduler_up", "Whether a scheduler answers.", self._load is not None)
        if self._load is not None:
            yield from self._of_load(self._load)

    def _of_load(self, load: Load) -> Iterator[Metric]:
        for field, (name, text) in GAUGES.items():
            yield self._metric(GaugeMetricFamily, name, text, getattr(load, field))
        for field, (name, text) in COUNTERS.items():
            yield self._metric(CounterMetricFamily, name, text, getattr(load, field))
        for field, (name, text) in WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(f"pageant_{name}", text, labels=("model_name", "worker"))
            for worker in load.workers:
                gauge.add_metric((self._model, worker.instance), getattr(worker, field))
            yield gauge
        steps = CounterMetricFamily("pageant_worker_steps", "Steps computed.", labels=("model_name", "worker"))
        for worker in load.workers:
            steps.add_metric((self._model, worker.instance), worker.num_steps)
        yield steps

    def _metric(
        self, family: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        metric = family(f"pageant_{name}", text, labels=("model_name",))
        metric.add_metric((self._model,), float(value))
        return metric


def exposition(model: str, load: Load | None, num_open_streams: int) -> bytes:
    """The text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LoadCollector(model, load, num_open_streams))
    return generate_latest(registry)
