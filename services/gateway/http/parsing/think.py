"""Reasoning between <think> and </think>, before the answer."""

from __future__ import annotations

from enum import Enum, auto

from services.gateway.http.parsing.parts import Content, Part, Reasoning
from services.gateway.http.parsing.text import Trimmed, split_at

BEGIN, END = "<think>", "</think>"


class _Place(Enum):
    START = auto()
    INSIDE = auto()
    AFTER = auto()


class ThinkParser:
    """Reasoning is what stands between the tags, without the whitespace around it.

    Some templates write the opening tag themselves (`begins_inside`): then all is reasoning until the closing one.
    """

    def __init__(self, *, begins_inside: bool) -> None:
        self._begins_inside = begins_inside
        self._place = _Place.START
        self._text = ""
        self._reasoning = Trimmed(at_start=True)
        self._gap = False  # whether whitespace before the answer is still to be dropped

    def feed(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        if self._place is _Place.START:
            self._read_start()
        if self._place is _Place.INSIDE:
            self._read_inside(parts)
        if self._place is _Place.AFTER:
            self._read_answer(parts)
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._place is _Place.START:
            self._place = _Place.INSIDE if self._begins_inside else _Place.AFTER
        if self._place is _Place.INSIDE:
            self._think(self._text, parts)
        else:
            self._read_answer(parts)
        return parts

    def _read_start(self) -> None:
        begin = self._text.lstrip()
        if BEGIN.startswith(begin) and begin != BEGIN:
            return
        if begin.startswith(BEGIN):
            self._text = begin.removeprefix(BEGIN)
            self._place = _Place.INSIDE
        else:
            self._place = _Place.INSIDE if self._begins_inside else _Place.AFTER

    def _read_inside(self, parts: list[Part]) -> None:
        before, found, self._text = split_at(self._text, END)
        self._think(before, parts)
        if found:
            self._place = _Place.AFTER
            self._gap = True

    def _read_answer(self, parts: list[Part]) -> None:
        text, self._text = self._text, ""
        if self._gap:
            text = text.lstrip()
        if text:
            self._gap = False
            parts.append(Content(text))

    def _think(self, text: str, parts: list[Part]) -> None:
        if text and (shown := self._reasoning.push(text)):
            parts.append(Reasoning(shown))
