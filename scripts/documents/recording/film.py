"""A recording as an SVG that plays itself again and again: two windows of a terminal, text at the times of the run.

A viewer that does not animate shows the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from scripts.documents.recording.scene import CLIENT, OPERATOR, Scene
from scripts.documents.svg import MONO, box, picture

COLUMNS, SIZE, LINE = 92, 13, 18
ADVANCE = 7.8  # width of a character; `textLength` makes every font keep it
MARGIN, HEAD = 14, 26
HOLD = 5.0  # seconds that the end stays
TOGETHER = 0.04  # text that comes within so many seconds appears at once
PAPER, BAR, INK, ORDER, ALARM = "#0f172a", "#1e293b", "#e2e8f0", "#7dd3fc", "#fca5a5"
TITLES = {CLIENT: "client", OPERATOR: "operator"}


@dataclass
class FilmSpan:
    """Text of one line that appears at one moment."""

    at: float
    row: int
    column: int
    text: str
    is_order: bool


def draw(found: Scene) -> str:
    """The picture; it is as long as the run, and holds its end."""
    length = found.events[-1].at + HOLD
    width = round(COLUMNS * ADVANCE + 2 * MARGIN)
    windows = {window: list(spans(found, window)) for window in (CLIENT, OPERATOR)}
    rows = {window: max(span.row for span in shown) + 1 for window, shown in windows.items()}
    parts, top = [], 0
    for window, shown in windows.items():
        height = HEAD + rows[window] * LINE + MARGIN
        parts += [box(0, top, width, height, PAPER), box(0, top, width, HEAD, BAR)]
        parts.append(f'<text x="{MARGIN}" y="{top + 18}" font-size="12" fill="{INK}">{TITLES[window]}</text>')
        parts += [_text(span, top + HEAD + 16, length) for span in shown]
        top += height + 6
    title = "The worker is killed in mid-stream; the stream pauses and continues, and diff finds no difference"
    return picture(width, top - 6, title, parts, family=MONO)


def spans(found: Scene, window: str) -> Iterator[FilmSpan]:
    """The window's text in lines of its width, broken between words."""
    row = column = 0
    for at, text in _moments(found, window):
        for number, line in enumerate(text.split("\n")):
            if number:
                row, column = row + 1, 0
            begun, first = "", column
            for word in _words(line):
                if column + len(word.rstrip()) > COLUMNS and column:
                    if begun:
                        yield _span(at, row, first, begun)
                    row, column, begun, first = row + 1, 0, "", 0
                begun += word
                column += len(word)
            if begun.strip():
                yield _span(at, row, first, begun)


def _span(at: float, row: int, column: int, text: str) -> FilmSpan:
    return FilmSpan(at, row, column, text, text.startswith("$ "))


def _words(line: str) -> list[str]:
    """Words, each with the space behind it."""
    parts = line.split(" ")
    return [f"{part} " for part in parts[:-1]] + [part for part in parts[-1:] if part]


def _moments(found: Scene, window: str) -> list[tuple[float, str]]:
    moments: list[tuple[float, str]] = []
    for event in found.events:
        if event.window != window:
            continue
        if moments and event.at - moments[-1][0] < TOGETHER and not event.text.startswith("$ "):
            moments[-1] = (moments[-1][0], moments[-1][1] + event.text)
        else:
            moments.append((event.at, event.text))
    return moments


def _text(span: FilmSpan, top: int, length: float) -> str:
    text = span.text.rstrip()
    colour = ALARM if "kill -9" in text or "ended with" in text else ORDER if span.is_order else INK
    place = f'x="{MARGIN + span.column * ADVANCE:g}" y="{top + span.row * LINE}" textLength="{len(text) * ADVANCE:g}"'
    shows = ""
    if span.at > 0:
        shows = (
            f'<animate attributeName="visibility" values="hidden;visible" keyTimes="0;{span.at / length:.4f}" '
            f'calcMode="discrete" dur="{length:g}s" repeatCount="indefinite"/>'
        )
    style = f'font-size="{SIZE}" fill="{colour}" xml:space="preserve"'
    return f"<text {place} {style}>{escape(text)}{shows}</text>"
