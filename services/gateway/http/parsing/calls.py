"""What the parsers of all formats of calls have in common: text that is not read yet, and content around the calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from services.gateway.http.parsing.parts import CallFormat, Content, Part
from services.gateway.http.parsing.scanner import CallScanner
from services.gateway.http.parsing.text import Trimmed

Schemas = Mapping[str, Mapping[str, Any]]  # by function: the JSON schema of its arguments


class CallParser(ABC):
    """Parses one answer.  `_read` is the state: the method that reads on from here, and returns False where it needs
    more text.

    Invariant: `_raw` is the text of the block under way, as long as that may still turn out to be content.
    """

    keeps_special_tokens: ClassVar[bool] = False  # whether the format is written with special tokens
    form: ClassVar[CallFormat]

    def __init__(self, start: Callable[[list[Part]], bool]) -> None:
        self._read = start
        self._text = ""  # not read yet
        self._content = Trimmed(at_start=False)
        self._scanner = CallScanner()
        self._raw: list[str] = []

    def opening(self, name: str) -> str:
        """How a call of `name` begins, up to its arguments: put before the answer, it makes the model call it."""
        return self.form.begin + self.form.name(name) + self.form.middle

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

    @abstractmethod
    def _end(self, parts: list[Part]) -> None:
        """The text has ended in this state."""

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
