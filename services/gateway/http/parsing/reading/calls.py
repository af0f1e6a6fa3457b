"""What the parsers of all formats of calls have in common: text that is not read yet, and content around the calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from services.gateway.http.parsing.reading.parts import CallArguments, CallFormat, Content, Part, ReadOn
from services.gateway.http.parsing.reading.scanner import CallScanner, ValueScanner
from services.gateway.http.parsing.reading.text import Trimmed

Schemas = Mapping[str, Mapping[str, Any]]  # by function: the JSON schema of its arguments


class CallParser:
    """Parses one answer.  `_read` is the state.

    Invariant: `_raw` is the text of the block under way, as long as that may still turn out to be content.
    """

    keeps_special_tokens: ClassVar[bool] = False  # whether the format is written with special tokens
    form: ClassVar[CallFormat]

    def __init__(self, schemas: Schemas | None = None) -> None:
        self._schemas = schemas or {}
        self._read: ReadOn = self._read_text
        self._text = ""  # not read yet
        self._content = Trimmed(at_start=False)
        self._scanner = CallScanner()
        self._value = ValueScanner()
        self._behind: ReadOn = self._read_text  # the state behind that value
        self._raw: list[str] = []

    def opening(self, name: str, num_calls: int = 0) -> str:
        """How a call of `name` begins, up to its arguments: put before the answer, it makes the model call it.
        `num_calls`: how many the conversation has before it."""
        return self.form.begin + self.form.head(name, num_calls)

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain with this text."""
        self._text += text
        parts: list[Part] = []
        while self._read(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The parts that were held back, when no more text will come."""
        parts: list[Part] = []
        self._end(parts)
        if rest := self._content.flush():
            parts.append(Content(rest))
        return parts

    def _end(self, parts: list[Part]) -> None:
        """The text has ended in this state: what may still have become a call is content."""
        if self._raw or self._read == self._read_text:
            self._say("".join(self._raw) + self._text, parts)

    def _read_text(self, parts: list[Part]) -> bool:
        """Content, here to the end; formats whose calls may begin within it look for them."""
        self._say(self._text, parts)
        self._text = ""
        return False

    def _read_space(self) -> str:
        """Read white space that may belong to a call; returns what is behind it."""
        begin = self._text.lstrip()
        self._raw.append(self._text[: len(self._text) - len(begin)])
        self._text = begin
        return begin

    def _read_past(self, tag: str, then: ReadOn, beside: str | None = None) -> bool:
        """Drop white space, or the characters `beside`, and the tag behind it, which a model may forget."""
        self._text = self._text.lstrip(beside)
        if tag.startswith(self._text) and self._text != tag:
            return False
        self._read, self._text = then, self._text.removeprefix(tag)
        return True

    def _read_value(self, parts: list[Part]) -> bool:
        """Arguments that are JSON."""
        end = self._value.push(self._text, 0)
        if end:
            parts.append(CallArguments(self._text[:end]))
        self._text = self._text[end:]
        if self._value.done:
            self._read = self._behind
        return self._value.done

    def _give_back(self, parts: list[Part]) -> None:
        """What looked like a call is none: its opening is content, and what follows is read again."""
        self._say("".join(self._raw), parts)
        self._read, self._raw = self._read_text, []

    def _scan(self, parts: list[Part]) -> None:
        """Read on in the call object under way."""
        num_read = self._scanner.push(self._text)
        self._raw.append(self._text[:num_read])
        self._text = self._text[num_read:]
        if self._scanner.begun:
            self._raw.clear()
            self._content.cut()
        parts += self._scanner.take()

    def _say(self, text: str, parts: list[Part]) -> None:
        if text and (shown := self._content.push(text)):
            parts.append(Content(shown))
