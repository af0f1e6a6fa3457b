"""Mistral's formats: [TOOL_CALLS] and then a list of {"name": ..., "arguments": {...}}, or name[ARGS]{...} each."""

from __future__ import annotations

import re
from enum import Enum, auto

import msgspec

from services.gateway.http.parsing.parts import CallArguments, CallBegun, CallFormat, Content, Part
from services.gateway.http.parsing.scanner import CallScanner, State, ValueScanner
from services.gateway.http.parsing.text import Trimmed, split_at

TAG = "[TOOL_CALLS]"
NAMED = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")
MAX_HEADING = 256  # characters between the tag and the arguments; more is no heading


class _Place(Enum):
    TEXT = auto()
    HEADING = auto()  # behind the tag: a bracket, or a name
    LIST = auto()  # between the calls of a list
    CALL = auto()  # in a list
    ARGUMENTS = auto()  # of a call whose name stood before


class MistralParser:
    """What is outside the calls is content."""

    keeps_special_tokens = True
    form = CallFormat(f'{TAG}[{{"name": ', ', "arguments": ', "}", again=', {"name": ', end="]")

    def __init__(self) -> None:
        self._place = _Place.TEXT
        self._text = ""
        self._content = Trimmed(at_start=False)
        self._scanner = CallScanner()
        self._arguments = ValueScanner()
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
        if self._raw and self._place is not _Place.TEXT:
            self._give_back(parts)
        if self._place is _Place.TEXT:
            self._say(self._text, parts)
        if rest := self._content.flush():
            parts.append(Content(rest))
        return parts

    def _step(self, parts: list[Part]) -> bool:
        match self._place:
            case _Place.TEXT:
                return self._read_text(parts)
            case _Place.HEADING:
                return self._read_heading(parts)
            case _Place.LIST:
                return self._read_list(parts)
            case _Place.CALL:
                return self._read_call(parts)
            case _Place.ARGUMENTS:
                return self._read_arguments(parts)

    def _read_text(self, parts: list[Part]) -> bool:
        before, found, self._text = split_at(self._text, TAG)
        self._say(before, parts)
        if found:
            self._place, self._raw = _Place.HEADING, [TAG]
        return found

    def _read_heading(self, parts: list[Part]) -> bool:
        heading = self._text[:MAX_HEADING]
        begin = heading.lstrip()
        if begin.startswith("[") and not "[ARGS]".startswith(begin[:6]):
            end = len(heading) - len(begin) + 1
            self._raw.append(heading[:end])
            self._place, self._text = _Place.LIST, self._text[end:]
        elif begin.startswith("{"):
            self._place, self._scanner = _Place.CALL, CallScanner()
        elif found := NAMED.match(heading):
            self._content.cut()
            parts.append(CallBegun(found[1]))
            self._place, self._arguments, self._raw = _Place.ARGUMENTS, ValueScanner(), []
            self._text = self._text[found.end() :]
        elif "{" in heading or len(heading) == MAX_HEADING:
            self._give_back(parts)
        else:
            return False
        return True

    def _read_list(self, parts: list[Part]) -> bool:
        self._text = self._text.lstrip(" \t\r\n,")
        if self._text.startswith("{"):
            self._place, self._scanner = _Place.CALL, CallScanner()
        elif self._text.startswith("]"):
            self._place, self._raw = _Place.TEXT, []
            self._text = self._text[1:]
        elif self._text:
            self._give_back(parts)
        else:
            return False
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
        if scanner.state is State.DONE:
            self._place = _Place.LIST
        elif scanner.state is State.BROKEN:
            self._give_back(parts)
        return scanner.ended

    def _read_arguments(self, parts: list[Part]) -> bool:
        end = self._arguments.push(self._text, 0)
        if end:
            parts.append(CallArguments(self._text[:end]))
        self._text = self._text[end:]
        if self._arguments.done:
            self._place, self._raw = _Place.TEXT, []
        return self._arguments.done

    def _give_back(self, parts: list[Part]) -> None:
        """What looked like a call is none: it is content, and so is what follows."""
        self._say("".join(self._raw), parts)
        self._place, self._raw = _Place.TEXT, []

    def _say(self, text: str, parts: list[Part]) -> None:
        if text and (shown := self._content.push(text)):
            parts.append(Content(shown))
