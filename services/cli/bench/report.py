"""A run in figures: the printed block and the JSON that users of vLLM's `bench serve` know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from services.cli.bench.generator import RequestOutcome, lateness
from shared.metrics import (
    Acceptance,
    ModelWork,
    Slo,
    Summary,
    peak_concurrency,
    peak_rate,
    per_minute,
    rate,
    serial_rate,
    summarise,
    utilisation,
)

WIDTH = 50
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
EXTRA_METRICS = {"tbt": "Time between Tokens", "tpot_with_first": "Time per Output Token (E2EL / tokens)"}


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was told, as far as its report repeats it."""

    backend: str
    model: str
    request_rate: float  # inf: all at once, or a trace's own times
    burstiness: float
    max_concurrency: int
    label: str = ""
    slo: Slo = Slo()
    percentiles: Sequence[float] = (99.0,)
    metrics: Sequence[str] = ("ttft", "tpot", "itl")
    work: ModelWork | None = None  # of the served model; None: no MFU
    peak_flops: float = 0.0  # floating point operations per second of all the workers' devices together


class Report(msgspec.Struct, frozen=True):
    """All figures of one run; latencies in seconds."""

    options: RunOptions
    outcomes: Sequence[RequestOutcome]
    duration: float  # from time 0 to the last end
    summaries: dict[str, Summary]
    acceptance: Acceptance

    @property
    def completed(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.succeeded]

    @property
    def num_good(self) -> int:
        """Requests that met every objective."""
        lines = (outcome.timeline for outcome in self.completed)
        return sum(self.options.slo.met(line.ttft, line.tpot, line.e2el) for line in lines)


def report_of(options: RunOptions, outcomes: Sequence[RequestOutcome], acceptance: Acceptance) -> Report:
    """Sum up a run that has ended."""
    duration = max((outcome.end for outcome in outcomes), default=0.0)
    lines = [outcome.timeline for outcome in outcomes if outcome.succeeded]
    qs = {50.0, 90.0, 99.0, *options.percentiles}
    summaries = {
        "ttft": summarise(_given(line.ttft for line in lines), qs),
        "tpot": summarise(_given(line.tpot for line in lines), qs),
        "itl": summarise((gap for line in lines for gap in line.itl), qs),
        "tbt": summarise((gap for line in lines for gap in line.tbt), qs),
        "e2el": summarise(_given(line.e2el for line in lines), qs),
        "tpot_with_first": summarise(_given(line.tpot_with_first for line in lines), qs),
    }
    return Report(options, outcomes, duration, summaries, acceptance)


def figures(report: Report) -> dict[str, float]:
    """Counts and rates under their JSON keys."""
    done, seconds = report.completed, report.duration
    num_input = sum(outcome.num_prompt_tokens for outcome in done)
    num_output = sum(outcome.num_output_tokens for outcome in done)
    outputs = ((time, count) for o in done for time, count in zip(o.timeline.times, o.timeline.counts, strict=True))
    num_late, worst = lateness(report.outcomes)
    return {
        "duration": seconds,
        "completed": len(done),
        "failed": len(report.outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(outcome.num_cached_tokens for outcome in done),
        "request_throughput": rate(len(done), seconds),
        "request_goodput": rate(report.num_good, seconds) if report.options.slo else math.nan,
        "queries_per_minute": per_minute(len(done), seconds),
        "serial_queries_per_second": serial_rate(_given(outcome.timeline.e2el for outcome in done)),
        "output_throughput": rate(num_output, seconds),
        "total_token_throughput": rate(num_input + num_output, seconds),
        "max_output_tokens_per_s": peak_rate(outputs),
        "max_concurrent_requests": peak_concurrency((o.sent, o.end) for o in done),
        "mfu": mfu(report),
        "num_late_requests": num_late,
        "max_late_ms": 1000 * worst,
    }


def mfu(report: Report) -> float:
    """The share of the devices' arithmetic that finished requests used; NaN where model or peak is not known.

    Counted once per token and request, as the field does: tokens of a cached prefix cost nothing, and neither padding,
    nor what a preemption computes again, nor drafts that were rejected count as work.
    """
    work, peak = report.options.work, report.options.peak_flops
    if work is None or not peak:
        return math.nan
    return utilisation(sum(_flops(work, outcome) for outcome in report.completed), report.duration, peak)


def _flops(work: ModelWork, outcome: RequestOutcome) -> float:
    """The last output token is sampled and not computed; the token at position i attends to i + 1 keys."""
    first, end = outcome.num_cached_tokens, outcome.num_prompt_tokens + outcome.num_output_tokens - 1
    num_pairs = (end * (end + 1) - first * (first + 1)) // 2
    return work.flops(end - first, outcome.num_output_tokens, num_pairs)


def block(report: Report) -> str:
    """The printed block."""
    options, values = report.options, figures(report)
    lines = [
        f"{' Serving Benchmark Result ':=^{WIDTH}}",
        _line("Successful requests:", values["completed"]),
        _line("Failed requests:", values["failed"]),
        *([_line("Maximum request concurrency:", options.max_concurrency)] if options.max_concurrency else []),
        *([_line("Request rate configured (RPS):", options.request_rate)] if options.request_rate < math.inf else []),
        _line("Benchmark duration (s):", values["duration"]),
        _line("Total input tokens:", values["total_input_tokens"]),
        _line("Total generated tokens:", values["total_output_tokens"]),
        _line("Request throughput (req/s):", values["request_throughput"]),
        *([_line("Request goodput (req/s):", values["request_goodput"])] if options.slo else []),
        _line("Queries per minute (QPM):", values["queries_per_minute"]),
        _line("Queries per second, serial (QPS):", values["serial_queries_per_second"]),
        _line("Output token throughput (tok/s):", values["output_throughput"]),
        _line("Peak output token throughput (tok/s):", values["max_output_tokens_per_s"]),
        _line("Peak concurrent requests:", values["max_concurrent_requests"]),
        _line("Total token throughput (tok/s):", values["total_token_throughput"]),
        *([_line("Model FLOPs utilization (%):", 100 * values["mfu"])] if options.work is not None else []),
    ]
    for name in options.metrics:
        lines += _section(name, report.summaries[name], options.percentiles)
    if report.acceptance.num_drafts:
        lines += _speculation(report.acceptance)
    return "\n".join([*lines, "=" * WIDTH])


def _section(name: str, summary: Summary, percentiles: Iterable[float]) -> list[str]:
    title, short = (TITLES | EXTRA_METRICS)[name], name.upper()
    pairs = [("Mean", summary.mean), ("Median", summary.median)]
    pairs += [(f"P{q:g}", summary.percentiles[q]) for q in percentiles]
    return [f"{title:-^{WIDTH}}", *(_line(f"{what} {short} (ms):", 1000 * value) for what, value in pairs)]


def _speculation(acceptance: Acceptance) -> list[str]:
    lines = [
        f"{'Speculative Decoding':-^{WIDTH}}",
        _line("Acceptance rate (%):", 100 * acceptance.rate),
        _line("Acceptance length:", acceptance.length),
        _line("Drafts:", acceptance.num_drafts),
        _line("Draft tokens:", acceptance.num_draft_tokens),
        _line("Accepted tokens:", acceptance.num_accepted_tokens),
        "Per-position acceptance (%):",
    ]
    return lines + [_line(f"  Position {n}:", 100 * r) for n, r in enumerate(acceptance.rates_per_position)]


def _line(what: str, value: float) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{what:<40} {text:<10}".rstrip()


def as_json(report: Report, *, detailed: bool) -> dict[str, Any]:
    """The result file; `detailed` adds one entry per request to the lists."""
    options = report.options
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label or None,
        "model_id": options.model,
        "tokenizer_id": options.model,
        "num_prompts": len(report.outcomes),
        "request_rate": options.request_rate if options.request_rate < math.inf else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency or None,
        **figures(report),
        "rtfx": 0.0,
    }
    for name, summary in report.summaries.items():
        result |= {f"mean_{name}_ms": 1000 * summary.mean, f"median_{name}_ms": 1000 * summary.median}
        result[f"std_{name}_ms"] = 1000 * summary.std
        result |= {f"p{q:g}_{name}_ms": 1000 * value for q, value in summary.percentiles.items() if q != 50.0}
    if report.acceptance.num_drafts:
        result |= _acceptance_json(report.acceptance)
    return result | (_details(report.outcomes) if detailed else {})


def _acceptance_json(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "spec_decode_acceptance_rate": 100 * acceptance.rate,
        "spec_decode_acceptance_length": acceptance.length,
        "spec_decode_num_drafts": acceptance.num_drafts,
        "spec_decode_draft_tokens": acceptance.num_draft_tokens,
        "spec_decode_accepted_tokens": acceptance.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": acceptance.rates_per_position,
    }


def _details(outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    lines = [outcome.timeline for outcome in outcomes]
    return {
        "input_lens": [outcome.num_prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.num_output_tokens for outcome in outcomes],
        "ttfts": [line.ttft or 0.0 for line in lines],
        "itls": [line.itl for line in lines],
        "latencies": [line.e2el or 0.0 for line in lines],
        "start_times": [outcome.sent for outcome in outcomes],
        "intended_times": [line.start for line in lines],
        "queue_times": [outcome.sent - outcome.timeline.start for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def _given(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)
