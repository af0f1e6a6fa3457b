"""One picture of all arms: at each number of streams a bar for each, by its speed relative to that without drafts."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.bench.speculation.arms import KINDS, NONE
from scripts.bench.speculation.contest import Records
from scripts.documents.svg import box, picture, words

NAMES, PANEL, BAR, GAP, TOP, ROOM = 130, 190, 16, 6, 58, 44  # pixels; ROOM: behind the longest bar
INK, PALE = "#1e293b", "#94a3b8"
COLOURS = dict(zip(KINDS, ("#0369a1", "#4d7c0f", "#c2410c"), strict=True))


def draw(records: Records, title: str) -> str:
    counts, titles = sorted({streams for streams, _ in records}), list(dict.fromkeys(title for _, title in records))
    width, height = NAMES + len(counts) * PANEL + 14, TOP + len(titles) * (BAR + GAP) + 12
    parts = [
        box(0, 0, width, height, "#ffffff", radius=8),
        words(14, 22, title, 13, INK, weight="bold"),
        *(words(14, _y(row) + 12, name, 12, INK) for row, name in enumerate(titles)),
        *(part for place, streams in enumerate(counts) for part in _panel(records, titles, place, streams)),
    ]
    return picture(width, height, f"Tokens per second, of those without drafts: {title}", parts)


def _panel(records: Records, titles: list[str], place: int, streams: int) -> Iterator[str]:
    left = NAMES + place * PANEL
    plain = records[streams, NONE.name].speed
    worths = [records[streams, title].speed / plain for title in titles]
    yield words(left, TOP - 10, f"{streams} stream{'s' if streams > 1 else ''}: {plain:,.0f} tokens/s = 1", 12, INK)
    for row, (title, worth) in enumerate(zip(titles, worths, strict=True)):
        length = round((PANEL - ROOM) * worth / max(worths), 1)
        yield box(left, _y(row), length, BAR, COLOURS.get(title.split()[0], PALE), radius=2)
        yield words(left + length + 5, _y(row) + 12, f"{worth:.2f}", 12, INK)


def _y(row: int) -> int:
    return TOP + row * (BAR + GAP)
