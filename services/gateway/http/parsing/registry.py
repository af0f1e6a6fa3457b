"""Parsers by the names that settings give them; the names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.gateway.http.parsing.hermes import HermesParser
from services.gateway.http.parsing.llama3 import Llama3Parser
from services.gateway.http.parsing.mistral import MistralParser
from services.gateway.http.parsing.parts import Parser, ToolParser
from services.gateway.http.parsing.think import ThinkParser

TOOL_PARSERS: Mapping[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}


def make_tool_parser(name: str) -> ToolParser | None:
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
