"""Llama 3's JSON format: the whole answer is {"name": ..., "parameters": {...}}, or several with `;` between."""

from __future__ import annotations

from services.gateway.http.parsing.reading.calls import CallParser, Schemas
from services.gateway.http.parsing.reading.parts import CallFormat, Part
from services.gateway.http.parsing.reading.scanner import CallScanner, State

TAG = "<|python_tag|>"
KEYS = frozenset({"name", "parameters", "arguments", "type", "id"})  # another key: it is some other JSON
BETWEEN = " \t\r\n;,"


class Llama3Parser(CallParser):
    """An answer that does not begin with a call is content; so is what follows the last one.

    The tag, a special token, adds nothing to the brace behind it, so it may be skipped.
    """

    form = CallFormat('{"name": ', ', "parameters": ', "}", again='; {"name": ')

    def __init__(self, schemas: Schemas | None = None) -> None:
        super().__init__(schemas)
        self._read, self._scanner = self._read_start, CallScanner(only=KEYS)

    def _end(self, parts: list[Part]) -> None:
        if self._read == self._read_between:
            self._text = ""
        elif self._read == self._read_call and not self._scanner.begun:
            self._text = "".join(self._raw) + self._text
        self._read_text(parts)

    def _read_start(self, _: list[Part]) -> bool:
        begin = self._text.lstrip()
        if TAG.startswith(begin) and begin != TAG:
            return False
        tagged = begin.startswith(TAG)
        self._read = self._read_call if tagged or begin.startswith("{") else self._read_text
        if tagged:
            self._raw = [self._text[: len(self._text) - len(begin)] + TAG]
            self._text = begin.removeprefix(TAG)
        return True

    def _read_call(self, parts: list[Part]) -> bool:
        self._scan(parts)
        if not self._scanner.ended:
            return False
        self._read = self._read_between if self._scanner.state is State.DONE else self._read_text
        self._text = "".join(self._raw) + self._text
        self._raw = []
        return True

    def _read_between(self, _: list[Part]) -> bool:
        self._text = self._text.lstrip(BETWEEN)
        if self._text.startswith("{"):
            self._read, self._scanner = self._read_call, CallScanner(only=KEYS)
        elif self._text:
            self._read = self._read_text
        return bool(self._text)
