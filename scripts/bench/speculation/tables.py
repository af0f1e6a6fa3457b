"""Tokens per second of all arms by number of streams: for a terminal, for a document, and as a picture."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.report import figure
from scripts.bench.speculation.arms import ADAPTIVE, ASKED, NONE
from scripts.bench.speculation.contest import ModeRecord, Records
from scripts.bench.speculation.figures import adaptive_worth

LEGEND = (
    "tokens/s, medians (spread of the rounds); ~: others took more than 0.15 cores in some round; adaptive / best "
    "other: by medians of speeds relative to their round's mean; acceptance, draft length: the adaptive arm's"
)


def rows_of(records: Records) -> list[list[str]]:
    """The header, and a row per number of streams."""
    counts = sorted({streams for streams, _ in records})
    names = list(dict.fromkeys(name for _, name in records if name != ASKED.name))
    header = ["streams", *names, "adaptive / best other", "adaptive / none", "acceptance", "draft length"]
    return [header, *(_row(records, streams, names) for streams in counts)]


def table(records: Records, title: str) -> str:
    """Aligned, figures to the right."""
    rows = rows_of(records)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([title, *lines, LEGEND])


def markdown(records: Records, title: str) -> str:
    header, *rows = rows_of(records)
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines)])


def plot(records: Records, title: str, path: Path) -> None:
    """Speeds relative to no speculation, by number of streams.  Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = sorted({streams for streams, _ in records})
    drawing = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.add_subplot()
    for name in dict.fromkeys(name for _, name in records if name != ASKED.name):
        ratios = [records[streams, name].speed / records[streams, NONE.name].speed for streams in counts]
        width = 2.5 if name == ADAPTIVE.name else 1.2
        axes.plot(counts, ratios, marker="o", linewidth=width, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("concurrent streams")
    axes.set_ylabel("tokens/s, of no speculation's")
    axes.set_title(title)
    axes.legend()
    drawing.savefig(path, dpi=150)


def _row(records: Records, streams: int, names: list[str]) -> list[str]:
    own, worth = records[streams, ADAPTIVE.name], adaptive_worth(records, streams)[0]
    acceptance = own.acceptance
    return [
        str(streams),
        *(_cell(records[streams, name]) for name in names),
        f"{worth:.2f}",
        f"{own.speed / records[streams, NONE.name].speed:.2f}",
        "-" if acceptance is None else f"{acceptance:.2f}",
        f"{own.draft_length:.1f}",
    ]


def _cell(record: ModeRecord) -> str:
    return f"{'~' if record.is_noisy else ''}{figure(record.speed)} ({100 * record.spread:.0f} %)"
