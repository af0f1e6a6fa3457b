"""A whole answer: reasoning first, and calls in what is left of it."""

from __future__ import annotations

from collections.abc import Iterable

from services.gateway.http.parsing.parts import Content, Parser, Part


class OutputParser:
    """Either of the two parsers may be absent."""

    def __init__(self, reasoning: Parser | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        return self._answer(self._reasoning.feed(text) if self._reasoning else [Content(text)])

    def finish(self) -> list[Part]:
        """What was held back."""
        parts = self._answer(self._reasoning.finish()) if self._reasoning else []
        return parts + self._tools.finish() if self._tools else parts

    def _answer(self, parts: Iterable[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if self._tools and isinstance(part, Content):
                found += self._tools.feed(part.text)
            else:
                found.append(part)
        return found
