"""What the scheduler counts, under vLLM's names where it has one."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shared.exposition.families import Families
from shared.messages import Load
from shared.metrics.histogram import STEP_TOKENS, Histogram

ENGINE = "0"  # vLLM's label for one of several schedulers; there is one here
GAUGES = {
    "num_running": ("vllm:num_requests_running", "Sequences that take part in steps."),
    "num_waiting": ("vllm:num_requests_waiting", "Sequences that wait to be admitted."),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "Share of the KV blocks that running sequences hold, 0 to 1."),
}
COUNTERS = {
    "num_preemptions": ("vllm:num_preemptions", "Sequences that were preempted."),
    "num_prefix_cache_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "num_prefix_cache_hits": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of accepted requests, cached ones included."),
    "num_output_tokens": ("vllm:generation_tokens", "Tokens generated."),
    "num_drafts": ("vllm:spec_decode_num_drafts", "Times that draft tokens were verified."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    "num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
    "num_chunked_prefills": ("pageant_chunked_prefills", "Steps in which a prompt was computed in part."),
    "num_finished": ("pageant_requests_finished", "Requests that ended."),
    "num_aborted": ("pageant_requests_aborted", "Requests whose clients left, or had them aborted."),
    "num_rejected": ("pageant_requests_rejected", "Requests that the scheduler refused."),
    "num_expired": ("pageant_requests_expired", "Requests whose deadline passed before they had ended."),
    "num_block_copies": ("pageant_block_copies", "KV blocks that were copied on write."),
    "num_stale_draft_tokens": ("pageant_stale_draft_tokens", "Draft tokens that were proposed and never verified."),
    "num_late_drafts": ("pageant_late_drafts", "Times that a step waited for drafts that did not come in time."),
    "num_late_masks": (
        "pageant_late_masks",
        "Samples put off because the tokens that a grammar allows were not known in time.",
    ),
    "num_worker_losses": ("pageant_worker_losses", "Workers that were lost."),
}
WORKER_GAUGES = {
    "num_running": ("pageant_worker_requests_running", "Sequences with a row in this worker."),
    "num_blocks": ("pageant_worker_kv_blocks", "KV blocks of this worker."),
    "num_free_blocks": ("pageant_worker_kv_blocks_free", "KV blocks without contents."),
    "num_cached_blocks": ("pageant_worker_kv_blocks_cached", "KV blocks that are free, with contents worth keeping."),
}
FINGERPRINT = "pageant_worker_fingerprint_info"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


class EngineCollector(Collector):
    """The metrics of one moment; none but `pageant_scheduler_up` where no scheduler answers."""

    def __init__(self, model: str, load: Load | None) -> None:
        self._load = load
        self._families = Families(model_name=model, engine=ENGINE)

    def collect(self) -> Iterator[Metric]:
        make, load = self._families, self._load
        yield make.gauge("pageant_scheduler_up", "1 where a scheduler answers, else 0.", load is not None)
        if load is None:
            return
        for field, (name, text) in GAUGES.items():
            yield make.gauge(name, text, getattr(load, field))
        for field, (name, text) in COUNTERS.items():
            yield make.counter(name, text, getattr(load, field))
        positions = [({"position": str(place)}, n) for place, n in enumerate(load.num_accepted_tokens_per_position)]
        yield make.counter(PER_POSITION, "Accepted draft tokens by their position in the draft, from 0.", positions)
        for field, (name, text) in WORKER_GAUGES.items():
            yield make.gauge(name, text, [({"worker": one.instance}, getattr(one, field)) for one in load.workers])
        kinds = [({"worker": one.instance, "fingerprint": one.fingerprint}, 1) for one in load.workers]
        yield make.gauge(FINGERPRINT, "1; the labels name each worker and what it computes with.", kinds)
        steps = [({"worker": one.instance}, one.num_steps) for one in load.workers]
        yield make.counter("pageant_worker_steps", "Steps computed.", steps)
        tokens = Histogram(STEP_TOKENS)
        if len(load.step_tokens) == len(tokens.counts):  # else the scheduler has other buckets
            tokens.counts, tokens.sum = list(load.step_tokens), float(load.step_tokens_sum)
        yield make.histogram("vllm:iteration_tokens_total", "Tokens per step.", tokens)
