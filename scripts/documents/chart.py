"""The chart of README, drawn from the figures in docs/measurements/engines.json: scripts/chart [--check]

With `--check` nothing is written, and the status is 1 where the picture is stale.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec

from scripts.documents.svg import box, picture, words

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIGURES, PICTURE = DOCS / "measurements" / "engines.json", DOCS / "images" / "engines.svg"
WIDTH, NAMES, PANEL, BAR, GAP, TOP = 900, 214, 162, 20, 8, 62
OURS, OTHERS, INK, PALE = "#c2410c", "#94a3b8", "#1e293b", "#64748b"
ROOM = 46  # to the right of the longest bar, for its figure


class ChartedEngine(msgspec.Struct):
    name: str
    is_ours: bool
    figures: list[float | None]  # one per workload; None: it was not run


class Record(msgspec.Struct):
    """What was measured, when, where and by which command."""

    date: str
    machine: str
    command: str
    source: str
    model: str
    unit: str
    workloads: list[str]
    engines: list[ChartedEngine]


def record() -> Record:
    return msgspec.json.decode(FIGURES.read_bytes(), type=Record)


def draw(found: Record) -> str:
    """One panel for each workload, one bar for each engine."""
    height = TOP + len(found.engines) * (BAR + GAP) + 30
    title = f"Speed on a CPU in {found.unit}, {found.model}"
    foot = f"{found.date}, {found.machine}: {found.command}"
    parts = [
        box(0, 0, WIDTH, height, "#ffffff", radius=8),
        words(14, 24, title, 15, INK, weight="bold"),
        *_names(found),
        *(part for place in range(len(found.workloads)) for part in _panel(found, place)),
        words(14, height - 12, foot, 11, PALE),
    ]
    return picture(WIDTH, height, title, parts)


def _names(found: Record) -> Iterator[str]:
    for row, engine in enumerate(found.engines):
        yield words(14, _y(row) + 14, engine.name, 12, INK, weight="bold" if engine.is_ours else "normal")


def _panel(found: Record, place: int) -> Iterator[str]:
    left = NAMES + place * (PANEL + 8)
    longest = max(engine.figures[place] or 0 for engine in found.engines)
    yield words(left, TOP - 10, found.workloads[place], 12, INK, weight="bold")
    for row, engine in enumerate(found.engines):
        figure = engine.figures[place]
        if figure is None:
            yield words(left, _y(row) + 14, "not run", 11, PALE)
            continue
        width = (PANEL - ROOM) * figure / longest
        yield box(left, _y(row), round(width, 1), BAR, OURS if engine.is_ours else OTHERS, radius=2)
        yield words(round(left + width + 5, 1), _y(row) + 14, f"{figure:g}", 12, INK)


def _y(row: int) -> int:
    return TOP + row * (BAR + GAP)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 where the picture is stale")
    check, text = parser.parse_args().check, draw(record())
    is_stale = not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != text
    if is_stale and not check:
        PICTURE.write_text(text, encoding="utf-8")
    print(f"docs/images/{PICTURE.name}: {('stale' if check else 'written') if is_stale else 'as it was'}")
    return int(check and is_stale)
