"""Reasoning between tags, before the answer: <think> and </think>, or Gemma's channel."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.http.parsing.reading.parts import Content, Part, ReadOn, Reasoning
from services.gateway.http.parsing.reading.text import Trimmed, split_at_any

BEGIN, END = "<think>", "</think>"


class ThinkParser:
    """Reasoning is what stands between the tags, without the whitespace around it.

    Some templates write the opening tag themselves (`begins_inside`): then all is reasoning until the closing one.
    """

    def __init__(self, begin: str, ends: Sequence[str], *, begins_inside: bool) -> None:
        """`ends`: the closing tag, and the beginnings of calls, which end reasoning where a model forgets that tag."""
        self._begin_tag, self._ends = begin, ends
        self._read: ReadOn = self._read_start
        self._after_start: ReadOn = self._read_inside if begins_inside else self._read_answer
        self._text = ""
        self._reasoning = Trimmed(at_start=True)
        self._gap = False  # whether whitespace before the answer is still to be dropped

    def feed(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while self._read(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._read == self._read_start:
            self._read = self._after_start
        if self._read == self._read_inside:
            self._think(self._text, parts)
        else:
            self._read_answer(parts)
        return parts

    def _read_start(self, _: list[Part]) -> bool:
        begin = self._text.lstrip()
        if self._begin_tag.startswith(begin) and begin != self._begin_tag:
            return False
        self._read = self._after_start
        if begin.startswith(self._begin_tag):
            self._read, self._text = self._read_inside, begin.removeprefix(self._begin_tag)
        return True

    def _read_inside(self, parts: list[Part]) -> bool:
        before, tag, self._text = split_at_any(self._text, self._ends)
        self._think(before, parts)
        if tag:
            self._read, self._gap = self._read_answer, True
            self._text = tag + self._text if tag in self._ends[1:] else self._text
        return bool(tag)

    def _read_answer(self, parts: list[Part]) -> bool:
        text, self._text = self._text, ""
        if self._gap:
            text = text.lstrip()
        if text:
            self._gap = False
            parts.append(Content(text))
        return False

    def _think(self, text: str, parts: list[Part]) -> None:
        if text and (shown := self._reasoning.push(text)):
            parts.append(Reasoning(shown))
