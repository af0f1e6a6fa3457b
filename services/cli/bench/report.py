"""A run in figures: the printed block and the JSON that users of vLLM's `bench serve` know."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from services.cli.bench.generator import RequestOutcome, lateness
from services.cli.bench.options import ServeOptions
from services.cli.command_line.workloads import WorkloadOptions
from shared.metrics import (
    Acceptance,
    ModelWork,
    Summary,
    parse_slo,
    peak_concurrency,
    peak_rate,
    per_minute,
    rate,
    serial_rate,
    summarise,
    utilisation,
)

WIDTH = 50
TERA = 10**12
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "tbt": "Time between Tokens",
    "tpot_with_first": "Time per Output Token (E2EL / tokens)",
}
LINES = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "queries_per_minute": "Queries per minute (QPM):",
    "serial_queries_per_second": "Queries per second, serial (QPS):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
    "mfu_percent": "Model FLOPs utilization (%):",
}
DETAILS: dict[str, Callable[[RequestOutcome], Any]] = {  # of each request
    "input_lens": lambda outcome: outcome.num_prompt_tokens,
    "output_lens": lambda outcome: outcome.num_output_tokens,
    "ttfts": lambda outcome: outcome.timeline.ttft or 0.0,
    "itls": lambda outcome: outcome.timeline.itl,
    "latencies": lambda outcome: outcome.timeline.e2el or 0.0,
    "start_times": lambda outcome: outcome.sent,
    "intended_times": lambda outcome: outcome.timeline.start,
    "queue_times": lambda outcome: outcome.sent - outcome.timeline.start,
    "generated_texts": lambda outcome: outcome.text,
    "errors": lambda outcome: outcome.error,
}


class RunOptions(msgspec.Struct, frozen=True):
    """What a run's report repeats: how it was sent, what it sent, and to which model."""

    serve: ServeOptions
    load: WorkloadOptions
    model: str
    work: ModelWork | None = None  # of `mfu_model`; None: no MFU

    @property
    def request_rate(self) -> float:
        """inf: all at once, or a trace's own times."""
        return math.inf if self.load.request_rate is None else self.load.request_rate


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
        slo, lines = parse_slo(self.options.serve.goodput), (outcome.timeline for outcome in self.completed)
        return sum(slo.met(line.ttft, line.tpot, line.e2el) for line in lines)


def report_of(options: RunOptions, outcomes: Sequence[RequestOutcome], acceptance: Acceptance) -> Report:
    """Sum up a run that has ended."""
    duration = max((outcome.end for outcome in outcomes), default=0.0)
    lines = [outcome.timeline for outcome in outcomes if outcome.succeeded]
    qs = {50.0, 90.0, 99.0, *options.serve.metric_percentiles}
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
        "request_goodput": rate(report.num_good, seconds) if report.options.serve.goodput else math.nan,
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

    Each token counts once: neither cached prefixes nor padding, recomputation or rejected drafts count as work.  The
    last output token is sampled and not computed; the token at position i attends to i + 1 keys.
    """
    work, peak = report.options.work, TERA * report.options.serve.peak_tflops
    if work is None or not peak:
        return math.nan
    flops = 0.0
    for outcome in report.completed:
        first, end = outcome.num_cached_tokens, outcome.num_prompt_tokens + outcome.num_output_tokens - 1
        num_pairs = (end * (end + 1) - first * (first + 1)) // 2
        flops += work.flops(end - first, outcome.num_output_tokens, num_pairs)
    return utilisation(flops, report.duration, peak)


def block(report: Report) -> str:
    """The printed block; a line whose value was not asked for is left out."""
    options, asked, values = report.options.serve, report.options.request_rate, figures(report)
    values |= {
        "max_concurrency": options.max_concurrency or math.nan,
        "request_rate": asked if asked < math.inf else math.nan,
        "mfu_percent": 100 * values["mfu"],
    }
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line(label, values[key]) for key, label in LINES.items() if not math.isnan(values[key])]
    for name in options.percentile_metrics:
        summary, short = report.summaries[name], name.upper()
        lines.append(f"{TITLES[name]:-^{WIDTH}}")
        pairs = [("Mean", summary.mean), ("Median", summary.median)]
        pairs += [(f"P{q:g}", summary.percentiles[q]) for q in options.metric_percentiles]
        lines += [_line(f"{what} {short} (ms):", 1000 * value) for what, value in pairs]
    if report.acceptance.num_drafts:
        lines.append(f"{'Speculative Decoding':-^{WIDTH}}")
        lines += [_line(label, value) for _, label, value in _acceptance(report.acceptance)]
        lines.append("Per-position acceptance (%):")
        rates = report.acceptance.rates_per_position
        lines += [_line(f"  Position {place}:", 100 * rate) for place, rate in enumerate(rates)]
    return "\n".join([*lines, "=" * WIDTH])


def _acceptance(acceptance: Acceptance) -> tuple[tuple[str, str, float], ...]:
    """What speculation yielded: JSON key, label and value."""
    return (
        ("acceptance_rate", "Acceptance rate (%):", 100 * acceptance.rate),
        ("acceptance_length", "Acceptance length:", acceptance.length),
        ("num_drafts", "Drafts:", acceptance.num_drafts),
        ("draft_tokens", "Draft tokens:", acceptance.num_draft_tokens),
        ("accepted_tokens", "Accepted tokens:", acceptance.num_accepted_tokens),
    )


def _line(what: str, value: float) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{what:<40} {text}"


def as_json(report: Report, *, detailed: bool) -> dict[str, Any]:
    """The result file; `detailed` adds one entry per request to the lists."""
    options, asked = report.options.serve, report.options.request_rate
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label or None,
        "model_id": report.options.model,
        "tokenizer_id": report.options.model,
        "num_prompts": len(report.outcomes),
        "request_rate": asked if asked < math.inf else "inf",
        "burstiness": report.options.load.burstiness,
        "max_concurrency": options.max_concurrency or None,
        **figures(report),
        "rtfx": 0.0,
    }
    for name, summary in report.summaries.items():
        of_all = {"mean": summary.mean, "median": summary.median, "std": summary.std}
        of_all |= {f"p{q:g}": value for q, value in summary.percentiles.items() if q != 50.0}
        result |= {f"{what}_{name}_ms": 1000 * value for what, value in of_all.items()}
    if report.acceptance.num_drafts:
        result |= {f"spec_decode_{key}": value for key, _, value in _acceptance(report.acceptance)}
        result["spec_decode_per_position_acceptance_rates"] = report.acceptance.rates_per_position
    if detailed:
        result |= {name: [value(outcome) for outcome in report.outcomes] for name, value in DETAILS.items()}
    return result


def _given(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)
