"""Hermes' format, which Qwen shares: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times."""

from __future__ import annotations

from services.gateway.http.parsing.reading.calls import CallParser
from services.gateway.http.parsing.reading.parts import CallFormat, Part
from services.gateway.http.parsing.reading.scanner import CallScanner, State
from services.gateway.http.parsing.reading.text import split_at

BEGIN, END = "<tool_call>", "</tool_call>"
LEFT_OVER = " \t\r\n}]"  # between a call and its closing tag: models count brackets badly


class HermesParser(CallParser):
    """Everything outside the tags is content, and so is a block that turns out to be no call."""

    form = CallFormat(f'{BEGIN}\n{{"name": ', ', "arguments": ', f"}}\n{END}", again=f'\n{BEGIN}\n{{"name": ')

    def _read_text(self, parts: list[Part]) -> bool:
        before, found, self._text = split_at(self._text, BEGIN)
        self._say(before, parts)
        if found:
            self._read, self._scanner, self._raw = self._read_call, CallScanner(), [BEGIN]
        return found

    def _read_call(self, parts: list[Part]) -> bool:
        self._scan(parts)
        if not self._scanner.ended:
            return False
        if self._scanner.begun:
            self._read = self._read_tail if self._scanner.state is State.DONE else self._skip
        else:
            self._give_back(parts)
        return True

    def _read_tail(self, _: list[Part]) -> bool:
        """Behind a whole call, before its closing tag."""
        return self._read_past(END, self._read_text, LEFT_OVER)

    def _skip(self, _: list[Part]) -> bool:
        """A call that had begun and then went wrong: all up to its closing tag is lost."""
        _before, found, self._text = split_at(self._text, END)
        if found:
            self._read = self._read_text
        return found
