"""Mistral's formats: [TOOL_CALLS] and then a list of {"name": ..., "arguments": {...}}, or name[ARGS]{...} each; and
Phi's, which is such a list behind another word."""

from __future__ import annotations

import re
from typing import ClassVar

from services.gateway.http.parsing.reading.calls import CallParser
from services.gateway.http.parsing.reading.parts import CallBegun, CallFormat, Part
from services.gateway.http.parsing.reading.scanner import CallScanner, State, ValueScanner
from services.gateway.http.parsing.reading.text import split_at

TAG, PHI_TAG = "[TOOL_CALLS]", "functools"
NAMED = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")
MAX_HEADING = 256  # characters between the tag and the arguments; more is no heading


class MistralParser(CallParser):
    """What is outside the calls is content."""

    keeps_special_tokens = True
    tag: ClassVar[str] = TAG
    form = CallFormat(f'{TAG}[{{"name": ', ', "arguments": ', "}", again=', {"name": ', end="]")

    def _end(self, parts: list[Part]) -> None:
        if self._raw and self._read != self._read_text:
            self._give_back(parts)
        if self._read == self._read_text:
            self._say(self._text, parts)

    def _read_text(self, parts: list[Part]) -> bool:
        before, found, self._text = split_at(self._text, self.tag)
        self._say(before, parts)
        if found:
            self._read, self._raw = self._read_heading, [self.tag]
        return found

    def _read_heading(self, parts: list[Part]) -> bool:
        """Behind the tag: a bracket, or a name."""
        heading = self._text[:MAX_HEADING]
        begin = heading.lstrip()
        if begin.startswith("[") and not "[ARGS]".startswith(begin[:6]):
            end = len(heading) - len(begin) + 1
            self._raw.append(heading[:end])
            self._read, self._text = self._read_list, self._text[end:]
        elif begin.startswith("{"):
            self._read, self._scanner = self._read_call, CallScanner()
        elif found := NAMED.match(heading):
            self._content.cut()
            parts.append(CallBegun(found[1]))
            self._read, self._value, self._raw = self._read_value, ValueScanner(), []
            self._text = self._text[found.end() :]
        elif "{" in heading or len(heading) == MAX_HEADING:
            self._give_back(parts)
        else:
            return False
        return True

    def _read_list(self, parts: list[Part]) -> bool:
        """Between the calls of a list."""
        self._text = self._text.lstrip(" \t\r\n,")
        if self._text.startswith("{"):
            self._read, self._scanner = self._read_call, CallScanner()
        elif self._text.startswith("]"):
            self._read, self._raw = self._read_text, []
            self._text = self._text[1:]
        elif self._text:
            self._give_back(parts)
        else:
            return False
        return True

    def _read_call(self, parts: list[Part]) -> bool:
        """A call in a list."""
        self._scan(parts)
        if self._scanner.state is State.DONE:
            self._read = self._read_list
        elif self._scanner.state is State.BROKEN:
            self._give_back(parts)
        return self._scanner.ended


class PhiParser(MistralParser):
    """Phi-4-mini's: functools[{"name": ..., "arguments": {...}}].  Without the bracket the word is content."""

    keeps_special_tokens = False
    tag = PHI_TAG
    form = CallFormat(f'{PHI_TAG}[{{"name": ', ', "arguments": ', "}", again=', {"name": ', end="]")

    def _read_heading(self, parts: list[Part]) -> bool:
        if not self._text:
            return False
        if not self._text.startswith("["):
            self._give_back(parts)
            return True
        return super()._read_heading(parts)
