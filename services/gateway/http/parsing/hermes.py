"""Hermes' format, which Qwen shares: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from services.gateway.http.parsing.parts import CallFormat, Content, Part
from services.gateway.http.parsing.scanner import CallScanner, State
from services.gateway.http.parsing.text import Trimmed, split_at

BEGIN, END = "<tool_call>", "</tool_call>"
LEFT_OVER = " \t\r\n}]"  # between a call and its closing tag: models count brackets badly


class _Place(Enum):
    TEXT = auto()
    CALL = auto()
    TAIL = auto()  # behind a whole call, before its closing tag
    SKIP = auto()  # a call that went wrong when it had begun already: nothing is to be had until the closing tag


class HermesParser:
    """Everything outside the tags is content, and so is a block that turns out to be no call."""

    keeps_special_tokens = False
    form = CallFormat(f'{BEGIN}\n{{"name": ', ', "arguments": ', f"}}\n{END}", again=f'\n{BEGIN}\n{{"name": ')

    def __init__(self) -> None:
        self._place = _Place.TEXT
        self._text = ""  # not read yet
        self._content = Trimmed(at_start=False)
        self._scanner = CallScanner()
        self._raw: list[str] = []  # of the block under way, while it may still be content

    def opening(self, name: str) -> str:
        return self.form.begin + msgspec.json.encode(name).decode() + self.form.middle

    def feed(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._place is _Place.TEXT:
            self._say(self._text, parts)
        elif self._place is _Place.CALL and not self._scanner.begun:
            self._say("".join(self._raw) + self._text, parts)
        if rest := self._content.flush():
            parts.append(Content(rest))
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Read on; False where more text is needed."""
        match self._place:
            case _Place.TEXT:
                return self._read_text(parts)
            case _Place.CALL:
                return self._read_call(parts)
            case _Place.TAIL:
                return self._read_tail()
            case _Place.SKIP:
                return self._skip()

    def _read_text(self, parts: list[Part]) -> bool:
        before, found, self._text = split_at(self._text, BEGIN)
        self._say(before, parts)
        if found:
            self._place, self._scanner, self._raw = _Place.CALL, CallScanner(), [BEGIN]
        return found

    def _read_call(self, parts: list[Part]) -> bool:
        scanner = self._scanner
        num_read = scanner.push(self._text)
        if not scanner.begun:
            self._raw.append(self._text[:num_read])
        self._text = self._text[num_read:]
        if scanner.begun:
            self._content.cut()
        parts += scanner.take()
        if not scanner.ended:
            return False
        if scanner.begun:
            self._place = _Place.TAIL if scanner.state is State.DONE else _Place.SKIP
        else:
            self._place = _Place.TEXT
            self._say("".join(self._raw), parts)
        return True

    def _read_tail(self) -> bool:
        self._text = self._text.lstrip(LEFT_OVER)
        if END.startswith(self._text) and self._text != END:
            return False
        self._text = self._text.removeprefix(END)
        self._place = _Place.TEXT
        return True

    def _skip(self) -> bool:
        _, found, self._text = split_at(self._text, END)
        if found:
            self._place = _Place.TEXT
        return found

    def _say(self, text: str, parts: list[Part]) -> None:
        if text and (shown := self._content.push(text)):
            parts.append(Content(shown))
