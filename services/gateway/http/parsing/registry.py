"""Parsers by the names that settings give them, which are vLLM's, and a whole answer read by two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.gateway.http.parsing.calls import CallParser
from services.gateway.http.parsing.hermes import HermesParser
from services.gateway.http.parsing.llama3 import Llama3Parser
from services.gateway.http.parsing.mistral import MistralParser
from services.gateway.http.parsing.parts import Content, Parser, Part
from services.gateway.http.parsing.think import ThinkParser

TOOL_PARSERS: Mapping[str, type[HermesParser | Llama3Parser | MistralParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}


def make_tool_parser(name: str) -> CallParser | None:
    """One answer's parser; None where the setting is empty."""
    return TOOL_PARSERS[name]() if name else None


def make_reasoning_parser(name: str) -> Parser | None:
    """One answer's parser; None where the setting is empty."""
    match name:
        case "qwen3":
            return ThinkParser(begins_inside=False)
        case "deepseek_r1":
            return ThinkParser(begins_inside=True)
    return None


class OutputParser:
    """A whole answer: reasoning first, and calls in what is left of it.  Either of the two parsers may be absent."""

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
