"""Tokens per second of all arms by number of streams: for a terminal, for a document, and as a picture."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.common.report import figure
from scripts.bench.speculation.arms import ADAPTIVE, ASKED, NONE
from scripts.bench.speculation.contest import ModeRecord, Records
from scripts.bench.speculation.figures import adaptive_worth

LEGEND = (
    "tokens/s, medians (spread of the rounds); ~: others took more than 0.15 cores in some round; adaptive / best "
    "other: by medians of speeds relative to their round's mean; acceptance, draft length: the adaptive arm's"
)


def rows_of(records: Records) -> list[list[str]]:
    """The header, and a row per number of streams."""
    counts, names = _streams_and_arms(records)
    header = ["streams", *names, "adaptive / best other", "adaptive / none", "acceptance", "draft length"]
    return [header, *(_row(records, streams, names) for streams in counts)]


def _streams_and_arms(records: Records) -> tuple[list[int], list[str]]:
    names = dict.fromkeys(name for _, name in records if name != ASKED.name)
    return sorted({streams for streams, _ in records}), list(names)


def plot(records: Records, title: str, path: Path) -> None:
    """Speeds relative to no speculation, by number of streams.  Needs matplotlib."""
    from matplotlib.figure import Figure

    counts, names = _streams_and_arms(records)
    drawing = Figure(figsize=(7, 4.5), layout="constrained")
    axes = drawing.add_subplot()
    for name in names:
        ratios = [records[streams, name].speed / records[streams, NONE.name].speed for streams in counts]
        axes.plot(counts, ratios, marker="o", linewidth=2.5 if name == ADAPTIVE.name else 1.2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="concurrent streams", ylabel="tokens/s, of no speculation's", title=title)
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
