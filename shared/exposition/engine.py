"""What the scheduler counts, under vLLM's names where it has one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    "num_background_running": (
        "pageant_background_requests_running",
        "Sequences of batches that hold a row, whether they rest or not; not among vllm:num_requests_running.",
    ),
    "num_background_waiting": (
        "pageant_background_requests_waiting",
        "Sequences of batches that wait to be admitted; not among vllm:num_requests_waiting.",
    ),
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
MOVES = {
    "num_stored_blocks": ("pageant_blocks_stored", "KV blocks that workers gave to stores."),
    "num_stored_bytes": ("pageant_block_bytes_stored", "Bytes of these."),
    "num_fetched_blocks": ("pageant_blocks_fetched", "KV blocks that came to workers from elsewhere."),
    "num_fetched_bytes": ("pageant_block_bytes_fetched", "Bytes of these."),
    "num_failed_moves": ("pageant_moves_failed", "Orders to move KV blocks of which not all were moved."),
    "num_checks": ("pageant_blocks_verified", "KV blocks that were computed and compared with those of a store."),
    "num_false_blocks": (
        "pageant_blocks_false",
        "Of these, those that differed from the store's: that block, or an earlier one of its prefix, was wrong there.",
    ),
    "num_asked_tokens": ("vllm:external_prefix_cache_queries", "Prompt tokens that were asked for elsewhere."),
    "num_fetched_tokens": (
        "vllm:external_prefix_cache_hits",
        "Prompt tokens that came from elsewhere, and were not computed.",
    ),
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

    def __init__(
        self, model: str, load: Load | None, cache: Mapping[str, str] | None = None, max_model_len: int = 0
    ) -> None:
        """`cache`: settings of the KV cache, which become labels; `max_model_len`: tokens, 0 where it is not known."""
        self._load = load
        self._cache = cache or {}
        self._max_model_len = max_model_len
        self._families = Families(model_name=model, engine=ENGINE)

    def collect(self) -> Iterator[Metric]:
        make, load = self._families, self._load
        yield make.gauge("pageant_scheduler_up", "1 where a scheduler answers, else 0.", load is not None)
        if load is None:
            return
        for field, (name, text) in GAUGES.items():
            yield make.gauge(name, text, getattr(load, field))
        yield make.gauge(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait to be admitted, by reason: capacity (of blocks and places) is the only one here.",
            [({"reason": "capacity"}, load.num_waiting)],
        )
        for field, (name, text) in COUNTERS.items():
            yield make.counter(name, text, getattr(load, field))
        for field, (name, text) in MOVES.items():
            yield make.counter(name, text, getattr(load.moves, field))
        positions = [({"position": str(place)}, n) for place, n in enumerate(load.num_accepted_tokens_per_position)]
        yield make.counter(PER_POSITION, "Accepted draft tokens by their position in the draft, from 0.", positions)
        yield make.counter(
            "vllm:admission_rejections", "Requests that the scheduler refused to let in.", load.num_rejected
        )
        yield make.gauge(
            "vllm:cache_config_info",
            "1; the labels are settings of the KV cache, and what all workers have: blocks, tokens in them, and how "
            "many sequences of max_model_len tokens that is.",
            [({**self._cache, **self._sizes(sum(worker.num_blocks for worker in load.workers))}, 1)],
        )
        for field, (name, text) in WORKER_GAUGES.items():
            yield make.gauge(name, text, [({"worker": one.instance}, getattr(one, field)) for one in load.workers])
        adapters = [({"adapter": name}, count) for name, count in sorted(load.adapters.items())]
        yield make.gauge("pageant_adapter_requests", "Open requests by adapter: of 64 names, and others.", adapters)
        kinds = [({"worker": one.instance, "fingerprint": one.fingerprint}, 1) for one in load.workers]
        yield make.gauge(FINGERPRINT, "1; the labels name each worker and what it computes with.", kinds)
        steps = [({"worker": one.instance}, one.num_steps) for one in load.workers]
        yield make.counter("pageant_worker_steps", "Steps computed.", steps)
        tokens = Histogram(STEP_TOKENS)
        if len(load.step_tokens) == len(tokens.counts):  # else the scheduler has other buckets
            tokens.counts, tokens.sum = list(load.step_tokens), float(load.step_tokens_sum)
        yield make.histogram("vllm:iteration_tokens_total", "Tokens per step: of prompts, and generated.", tokens)

    def _sizes(self, num_blocks: int) -> dict[str, str]:
        """Labels; those that are not known are left out."""
        found = {"num_gpu_blocks": str(num_blocks)}
        if "block_size" in self._cache:
            num_tokens = num_blocks * int(self._cache["block_size"])
            found["kv_cache_size_tokens"] = str(num_tokens)
            if self._max_model_len:
                found["kv_cache_max_concurrency"] = f"{num_tokens / self._max_model_len:.2f}"
        return found
