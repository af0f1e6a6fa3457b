"""Figures as PNG files; matplotlib is an optional dependency, asked for when a figure is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from services.cli.bench.report import Report
    from services.simulator.sweep import Configuration, SimulatedOutcome, SweepResult

QS = (50.0, 90.0, 99.0)
PARTS = 200  # of a run, in its course


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    """A figure and its axes [rows, columns].  Raises click.ClickException without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.ClickException("plots need matplotlib: pip install 'pageant[bench]'") from error
    figure = Figure(figsize=(5.2 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    click.echo(f"plotted: {path}", err=True)


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


# -- measured runs


def plot_measured(reports: Sequence[Report], path: Path) -> None:
    """Latency percentiles over rate, throughput against latency, and the course of every run."""
    figure, axes = _figure(1 + len(reports), 3)
    for place, name in enumerate(("ttft", "itl")):
        for q in QS:
            points = [(_rate_of(report), 1000 * report.summaries[name].percentiles[q]) for report in reports]
            axes[0][place].plot(*zip(*sorted(points), strict=True), marker="o", label=f"p{q:g}")
        _label(axes[0][place], f"{name.upper()} over rate", "requests per second", "ms")
    by_rate = sorted(reports, key=_rate_of)  # beyond the capacity the curve turns back
    curve = [(_output_rate(report), 1000 * report.summaries["e2el"].median) for report in by_rate]
    axes[0][2].plot(*zip(*curve, strict=True), marker="o")
    _label(axes[0][2], "throughput and latency", "output tokens per second", "E2EL p50, ms")
    for row, report in zip(axes[1:], reports, strict=True):
        _plot_course(row, report)
    _save(figure, path)


def _rate_of(report: Report) -> float:
    """What was asked for, or what was reached where that was no number."""
    asked = report.options.request_rate
    return asked if math.isfinite(asked) else len(report.completed) / max(report.duration, 1e-9)


def _output_rate(report: Report) -> float:
    return sum(outcome.num_output_tokens for outcome in report.completed) / max(report.duration, 1e-9)


def _plot_course(axes: Sequence[Any], report: Report) -> None:
    """One run over time: every request's TTFT, the requests that are open, the tokens that come."""
    name, done = f"rate {report.options.request_rate:.3g}", report.completed
    ttfts = [(outcome.timeline.start, 1000 * (outcome.timeline.ttft or 0)) for outcome in done]
    axes[0].scatter([start for start, _ in ttfts], [ttft for _, ttft in ttfts], s=6)
    _label(axes[0], f"{name}: TTFT", "sent at, s", "ms")
    part = max(report.duration, 1e-9) / PARTS
    times = [part * index for index in range(PARTS + 1)]
    spans = [(outcome.timeline.start, outcome.end) for outcome in done]
    axes[1].plot(times, [sum(start <= time < end for start, end in spans) for time in times])
    _label(axes[1], f"{name}: open requests", "s", "requests")
    tokens: Counter[int] = Counter()
    for outcome in done:
        for time, count in zip(outcome.timeline.times, outcome.timeline.counts, strict=True):
            tokens[min(PARTS, int(time / part))] += count
    axes[2].plot(times, [tokens[index] / part for index in range(PARTS + 1)])
    _label(axes[2], f"{name}: output", "s", "tokens per second")


# -- simulated runs

Figure = tuple[str, str, "Callable[[SimulatedOutcome], float]"]
FIGURES: Sequence[Figure] = (
    ("TTFT p50", "ms", lambda outcome: 1000 * outcome.ttft.median),
    ("TTFT p99", "ms", lambda outcome: 1000 * outcome.ttft.percentiles[99.0]),
    ("ITL p50", "ms", lambda outcome: 1000 * outcome.itl.median),
    ("ITL p99", "ms", lambda outcome: 1000 * outcome.itl.percentiles[99.0]),
    ("prefix cache hits", "share of prompt tokens", lambda outcome: outcome.hit_rate),
    ("preemptions", "", lambda outcome: outcome.num_preemptions),
    ("in SLO", "share of requests", lambda outcome: outcome.attainment),
    ("goodput", "requests per second", lambda outcome: outcome.goodput),
)
CHOICES = ("num_workers", "num_blocks", "block_size", "max_num_batched_tokens")


def plot_simulation(results: Sequence[SweepResult], path: Path) -> None:
    """Every figure over the first of the choices that was varied; a line for each combination of the others."""
    choice = next((name for name in CHOICES if len({_value(result, name) for result in results}) > 1), "num_workers")
    lines: dict[str, list[SweepResult]] = {}
    for result in results:
        lines.setdefault(_rest(result.configuration, results, choice), []).append(result)
    figure, axes = _figure(2, 4)
    for place, (title, unit, value) in enumerate(FIGURES):
        axis = axes[place // 4][place % 4]
        for label, line in lines.items():
            points = sorted((_value(result, choice), value(result.outcome)) for result in line)
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
        _scale(axis, sorted({_value(result, choice) for result in results}), is_log=unit == "ms")
        _label(axis, title, choice, unit)
    _save(figure, path)


def _scale(axis: Any, choices: Sequence[int], *, is_log: bool) -> None:
    """The choices themselves under a logarithmic axis; plain numbers beside one."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(choices, labels=[str(choice) for choice in choices])
    if is_log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")


def _value(result: SweepResult, choice: str) -> int:
    value: int = getattr(result.configuration, choice)
    return value


def _rest(configuration: Configuration, results: Sequence[SweepResult], choice: str) -> str:
    """The choices that vary beside the one on the axis, in words."""
    names = (*CHOICES, "routing_policy")
    varied = (
        name
        for name in names
        if name != choice and len({getattr(result.configuration, name) for result in results}) > 1
    )
    parts = (str(getattr(configuration, name)) if name == "routing_policy" else f"{name} {getattr(configuration, name)}"
             for name in varied)  # fmt: skip
    return ", ".join(parts) or configuration.routing_policy
