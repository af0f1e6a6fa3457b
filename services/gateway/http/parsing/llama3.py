"""Llama 3's JSON format: the whole answer is {"name": ..., "parameters": {...}}, or several with `;` between."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from services.gateway.http.parsing.parts import CallFormat, Content, Part
from services.gateway.http.parsing.scanner import CallScanner, State
from services.gateway.http.parsing.text import Trimmed

TAG = "<|python_tag|>"
KEYS = frozenset({"name", "parameters", "arguments", "type", "id"})  # another key: it is some other JSON
BETWEEN = " \t\r\n;,"


class _Place(Enum):
    START = auto()
    CALL = auto()
    BETWEEN = auto()
    TEXT = auto()  # to the end


class Llama3Parser:
    """An answer that does not begin with a call is content; so is what follows the last one."""

    keeps_special_tokens = False  # the tag adds nothing to the brace behind it
    form = CallFormat('{"name": ', ', "parameters": ', "}", again='; {"name": ')

    def __init__(self) -> None:
        self._place = _Place.START
        self._text = ""
        self._content = Trimmed(at_start=False)
        self._scanner = CallScanner(only=KEYS)
        self._raw: list[str] = []

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
        if self._place is _Place.BETWEEN:
            self._text = ""
        elif self._place is _Place.CALL and not self._scanner.begun:
            self._text = "".join(self._raw) + self._text
        self._place = _Place.TEXT
        self._read_text(parts)
        if rest := self._content.flush():
            parts.append(Content(rest))
        return parts

    def _step(self, parts: list[Part]) -> bool:
        match self._place:
            case _Place.START:
                return self._read_start()
            case _Place.CALL:
                return self._read_call(parts)
            case _Place.BETWEEN:
                return self._read_between()
            case _Place.TEXT:
                self._read_text(parts)
                return False

    def _read_start(self) -> bool:
        begin = self._text.lstrip()
        if TAG.startswith(begin) and begin != TAG:
            return False
        tagged = begin.startswith(TAG)
        self._place = _Place.CALL if tagged or begin.startswith("{") else _Place.TEXT
        if tagged:
            self._raw = [self._text[: len(self._text) - len(begin)] + TAG]
            self._text = begin.removeprefix(TAG)
        return True

    def _read_call(self, parts: list[Part]) -> bool:
        scanner = self._scanner
        num_read = scanner.push(self._text)
        self._raw.append(self._text[:num_read])
        self._text = self._text[num_read:]
        if scanner.begun:
            self._raw.clear()
            self._content.cut()
        parts += scanner.take()
        if not scanner.ended:
            return False
        self._place = _Place.BETWEEN if scanner.state is State.DONE else _Place.TEXT
        self._text = "".join(self._raw) + self._text
        self._raw = []
        return True

    def _read_between(self) -> bool:
        self._text = self._text.lstrip(BETWEEN)
        if self._text.startswith("{"):
            self._place, self._scanner = _Place.CALL, CallScanner(only=KEYS)
        elif self._text:
            self._place = _Place.TEXT
        return bool(self._text)

    def _read_text(self, parts: list[Part]) -> None:
        if self._text and (shown := self._content.push(self._text)):
            parts.append(Content(shown))
        self._text = ""
