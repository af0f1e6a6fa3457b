"""Figures as PNG files; matplotlib is an optional dependency, imported when a figure is asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from services.cli.bench.report import Report
    from services.simulator.sweep import SimulatedOutcome, SweepResult

QS = (50.0, 90.0, 99.0)
PARTS = 200  # of a run, in its course
CHOICES = ("num_workers", "num_blocks", "block_size", "max_num_batched_tokens", "routing_policy")
FIGURES: Sequence[tuple[str, str, Callable[[SimulatedOutcome], float]]] = (
    ("TTFT p50", "ms", lambda outcome: 1000 * outcome.ttft.median),
    ("TTFT p99", "ms", lambda outcome: 1000 * outcome.ttft.percentiles[99.0]),
    ("ITL p50", "ms", lambda outcome: 1000 * outcome.itl.median),
    ("ITL p99", "ms", lambda outcome: 1000 * outcome.itl.percentiles[99.0]),
    ("prefix cache hits", "share of prompt tokens", lambda outcome: outcome.hit_rate),
    ("preemptions", "", lambda outcome: outcome.num_preemptions),
    ("in SLO", "share of requests", lambda outcome: outcome.attainment),
    ("goodput", "requests per second", lambda outcome: outcome.goodput),
)


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    """A figure and its axes [rows, columns].  Raises click.ClickException without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.ClickException("plots need matplotlib: pip install 'pageant[bench]'") from error
    figure = Figure(figsize=(5.2 * columns, 3.6 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    click.echo(f"plotted: {path}", err=True)


def _line(axes: Any, points: Iterable[tuple[float, float]], label: str = "") -> None:
    axes.plot(*zip(*points, strict=True), marker="o", label=label)


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if any(axes.get_legend_handles_labels()[1]):
        axes.legend(fontsize="small")


def plot_measured(reports: Sequence[Report], path: Path) -> None:
    """Latency percentiles over rate, throughput against latency, and the course of every run."""
    figure, axes = _figure(1 + len(reports), 3)
    by_rate = sorted(reports, key=_rate_of)  # beyond the capacity the curve turns back
    for axis, name in zip(axes[0], ("ttft", "itl"), strict=False):
        for q in QS:
            points = ((_rate_of(report), 1000 * report.summaries[name].percentiles[q]) for report in by_rate)
            _line(axis, points, f"p{q:g}")
        _label(axis, f"{name.upper()} over rate", "requests per second", "ms")
    _line(axes[0][2], ((_output_rate(report), 1000 * report.summaries["e2el"].median) for report in by_rate))
    _label(axes[0][2], "throughput and latency", "output tokens per second", "E2EL p50, ms")
    for row, report in zip(axes[1:], reports, strict=True):
        _plot_course(row, report)
    _save(figure, path)


def _rate_of(report: Report) -> float:
    """The rate that was asked for, or the one that was reached where that is infinite."""
    asked = report.options.request_rate
    return asked if math.isfinite(asked) else len(report.completed) / max(report.duration, 1e-9)


def _output_rate(report: Report) -> float:
    return sum(outcome.num_output_tokens for outcome in report.completed) / max(report.duration, 1e-9)


def _plot_course(axes: Sequence[Any], report: Report) -> None:
    """One run over time: every request's TTFT, the requests that are open, the tokens that come."""
    name, done, part = f"rate {report.options.request_rate:.3g}", report.completed, max(report.duration, 1e-9) / PARTS
    lines, times = [outcome.timeline for outcome in done], [part * index for index in range(PARTS + 1)]
    axes[0].scatter([line.start for line in lines], [1000 * (line.ttft or 0) for line in lines], s=6)
    _label(axes[0], f"{name}: TTFT", "sent at, s", "ms")
    axes[1].plot(times, [sum(o.timeline.start <= time < o.end for o in done) for time in times])
    _label(axes[1], f"{name}: open requests", "s", "requests")
    tokens: Counter[int] = Counter()
    for line in lines:
        for time, count in zip(line.times, line.counts, strict=True):
            tokens[min(PARTS, int(time / part))] += count
    axes[2].plot(times, [tokens[index] / part for index in range(PARTS + 1)])
    _label(axes[2], f"{name}: output", "s", "tokens per second")


def plot_simulation(results: Sequence[SweepResult], path: Path) -> None:
    """Every figure over the first of the choices that was varied; a line for each combination of the others."""
    values = {name: [getattr(result.configuration, name) for result in results] for name in CHOICES}
    varied = [name for name in CHOICES if len(set(values[name])) > 1]
    choice = next((name for name in varied if name != "routing_policy"), CHOICES[0])
    figure, axes = _figure(2, 4)
    for axis, (title, unit, value) in zip(axes.flat, FIGURES, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for index, result in enumerate(results):
            names = (name for name in varied if name not in (choice, "routing_policy"))
            label = ", ".join([*(f"{name} {values[name][index]}" for name in names), values["routing_policy"][index]])
            lines.setdefault(label, []).append((values[choice][index], value(result.outcome)))
        for label, points in lines.items():
            _line(axis, sorted(points), label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(set(values[choice])), labels=[str(value) for value in sorted(set(values[choice]))])
        if unit == "ms":  # plain numbers beside a logarithmic axis
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
        _label(axis, title, choice, unit)
    _save(figure, path)
