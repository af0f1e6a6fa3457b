"""What a gateway measures of the requests that it has served, under vLLM's names where it has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shared.exposition.engine import ENGINE
from shared.exposition.families import Families, Sample
from shared.metrics import histogram as buckets
from shared.metrics.histogram import Histogram
from shared.tracing.phases import QUEUE

HISTOGRAMS = {  # attribute: name, text, buckets
    "ttft": (
        "vllm:time_to_first_token_seconds",
        "From a request's arrival, or its sending where x-request-start names it, to its first output.",
        buckets.TTFT,
    ),
    "itl": (
        "vllm:inter_token_latency_seconds",
        "Between two outputs of one streamed request; tokens that arrive in one message are one output.",
        buckets.ITL,
    ),
    "tpot": (
        "vllm:request_time_per_output_token_seconds",
        "(last output - first output) / (tokens - 1) of each request.",
        buckets.ITL,
    ),
    "e2e": (
        "vllm:e2e_request_latency_seconds",
        "From a request's arrival to its end, the client's reading included.",
        buckets.E2E,
    ),
    "queue": ("vllm:request_queue_time_seconds", "Waiting to be admitted, for any cause.", buckets.QUEUE),
    "prefill": ("vllm:request_prefill_time_seconds", "From admission to the first token.", buckets.E2E),
    "decode": (
        "vllm:request_decode_time_seconds",
        "From the first token to the last, preemptions included.",
        buckets.E2E,
    ),
    "inference": ("vllm:request_inference_time_seconds", "From admission to the last token.", buckets.E2E),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens of a request.", buckets.NUM_TOKENS),
    "output_tokens": (
        "vllm:request_generation_tokens",
        "Tokens generated for a request, of all its sequences.",
        buckets.NUM_TOKENS,
    ),
    "n": ("vllm:request_params_n", "The n of a request.", buckets.NUM_SEQUENCES),
    "max_tokens": ("vllm:request_params_max_tokens", "The max_tokens of a request.", buckets.NUM_TOKENS),
    "preemptions": ("vllm:request_num_preemptions", "Preemptions of a request.", buckets.NUM_SEQUENCES),
}
QUEUE_LABELS = frozenset(phase.label for phase in QUEUE)
PREFILL = "prefill"
DECODE = ("decode", "draft_wait", "preempted", "recompute", "lost")  # vLLM's too counts a preemption within
FINISH_REASONS = ("stop", "length", "abort")


class RequestMeter(Collector):
    """Filled as requests go on and end; read at every scrape."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._families = Families(model_name=model, engine=ENGINE)
        self.histograms = {name: Histogram(bounds) for name, (_, _, bounds) in HISTOGRAMS.items()}
        self.successes: Counter[str] = Counter()  # by finish reason
        self.failures: Counter[str] = Counter()  # by status
        self.phases: Counter[str] = Counter()  # microseconds
        self.misses: Counter[str] = Counter()  # prompt tokens by reason
        self.itl = self.histograms["itl"]  # observed at every output
        self.num_open = 0

    def observe(self, name: str, value: float | None) -> None:
        """Of one request, by a key of HISTOGRAMS; times in seconds."""
        if value is not None:
            self.histograms[name].observe(value)

    def spent(self, phases: Mapping[str, float]) -> None:
        """Where a request's time went: milliseconds by phase."""
        for name, ms in phases.items():
            self.phases[name] += int(1000 * ms)
        queue = sum(ms for name, ms in phases.items() if name in QUEUE_LABELS) / 1000
        prefill, decode = phases.get(PREFILL, 0.0) / 1000, sum(phases.get(name, 0.0) for name in DECODE) / 1000
        times = {"queue": queue, "prefill": prefill, "decode": decode, "inference": prefill + decode}
        for name, seconds in times.items():
            self.observe(name, seconds)

    def missed(self, misses: Mapping[str, int]) -> None:
        """Prompt tokens that the prefix cache did not have, by reason."""
        self.misses.update(misses)

    def collect(self) -> Iterator[Metric]:
        make = self._families
        for name, (family, text, _) in HISTOGRAMS.items():
            yield make.histogram(family, text, self.histograms[name])
        yield make.counter(
            "vllm:request_success",
            "Requests that ended well, by reason: stop, length, abort.",
            [({"finished_reason": reason}, self.successes[reason]) for reason in FINISH_REASONS],
        )
        yield make.counter(
            "pageant_request_failures", "Requests that failed, by gRPC status.", _labelled("status", self.failures)
        )
        yield make.counter(
            "pageant_request_phase_seconds",
            "Seconds that requests spent in each phase (docs/tracing.md).",
            _labelled("phase", {phase: spent / 1e6 for phase, spent in self.phases.items()}),
        )
        yield make.counter(
            "pageant_prefix_cache_misses",
            "Prompt tokens that the prefix cache did not have, by reason.",
            _labelled("reason", self.misses),
        )
        yield make.gauge("pageant_gateway_open_streams", "Streams that are open at this gateway.", self.num_open)


def _labelled(label: str, values: Mapping[str, float]) -> Iterator[Sample]:
    return (({label: name}, value) for name, value in sorted(values.items()))
