"""Parsers by the names that settings give them, which are vLLM's, and a whole answer read by two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from services.gateway.http.parsing.formats.deepseek import KIMI_BEGIN, DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser
from services.gateway.http.parsing.formats.gemma import FunctionGemmaParser, Gemma4Parser
from services.gateway.http.parsing.formats.harmony import HarmonyAnswer, HarmonyParser
from services.gateway.http.parsing.formats.hermes import HermesParser
from services.gateway.http.parsing.formats.llama3 import Llama3Parser
from services.gateway.http.parsing.formats.mistral import MistralParser, PhiParser
from services.gateway.http.parsing.formats.parameters import DeepSeekV32Parser, GlmParser, Qwen3CoderParser
from services.gateway.http.parsing.formats.pythonic import PythonicParser
from services.gateway.http.parsing.formats.think import BEGIN, END, ThinkParser
from services.gateway.http.parsing.reading.calls import CallParser, Schemas
from services.gateway.http.parsing.reading.parts import Content, Parser, Part

HARMONY = "openai"
TOOL_PARSERS: Mapping[str, Callable[[Schemas | None], CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
    "glm45": GlmParser,
    "kimi_k2": KimiK2Parser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "deepseek_v32": DeepSeekV32Parser,
    HARMONY: HarmonyParser,
    "gemma4": Gemma4Parser,
    "functiongemma": FunctionGemmaParser,
    "llama4_pythonic": PythonicParser,
    "phi4_mini_json": PhiParser,
}
IN_SPECIAL_TOKENS = frozenset({"gemma4", "openai_gptoss"})  # reasoning that is written with special tokens
THINKS = ("thinking", "enable_thinking")  # variables of templates that open the reasoning


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How reasoning is opened and closed; each part of `begin`, and each end, is one token."""

    begin: tuple[str, ...] = (BEGIN,)
    ends: tuple[str, ...] = (END,)  # behind the first: the beginnings of calls, which end it too
    leads: str = ""  # what is to follow an end before the answer
    begins_inside: bool = False  # the template itself opens it
    is_asked_for: bool = False  # there is none unless the template's variables open it

    @property
    def texts(self) -> list[str]:
        """Whose token ids are needed."""
        return [*self.begin, *self.ends, self.leads]


HARMONY_REASONING = ReasoningFormat(
    ("<|channel|>", "analysis", "<|message|>"), ("<|end|>",), "<|start|>assistant<|channel|>final<|message|>"
)
REASONING_FORMATS = {
    "qwen3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(begins_inside=True),
    "deepseek_v3": ReasoningFormat(begins_inside=True, is_asked_for=True),
    "glm45": ReasoningFormat(),
    "kimi_k2": ReasoningFormat(ends=(END, KIMI_BEGIN)),
    "gemma4": ReasoningFormat(("<|channel>", "thought"), ("<channel|>",)),
    "openai_gptoss": HARMONY_REASONING,
}


def make_tool_parser(name: str, schemas: Schemas | None = None) -> CallParser | None:
    """One answer's parser; None where the setting is empty.  `schemas` say what arguments are that are bare text."""
    return TOOL_PARSERS[name](schemas) if name else None


def make_reasoning_parser(name: str, variables: Mapping[str, Any] | None = None) -> Parser | None:
    """One answer's parser; None where the setting is empty.  `variables`: those that the chat's template gets."""
    form = REASONING_FORMATS.get(name)
    if form is None or (form.is_asked_for and not _thinks(variables)):
        return None
    if form is HARMONY_REASONING:
        return HarmonyAnswer()
    return ThinkParser("".join(form.begin), form.ends, begins_inside=form.begins_inside)


def _thinks(variables: Mapping[str, Any] | None) -> bool:
    return any((variables or {}).get(one) for one in THINKS)


def begins_inside(name: str, variables: Mapping[str, Any] | None = None) -> bool:
    """Whether an answer begins within reasoning, as its parser reads it."""
    form = REASONING_FORMATS.get(name)
    return form is not None and form.begins_inside and (_thinks(variables) or not form.is_asked_for)


class OutputParser:
    """A whole answer: reasoning first, and calls in what is left of it.  Either of the two parsers may be absent."""

    def __init__(self, reasoning: Parser | None, tools: Parser | None) -> None:
        self._reasoning = None if isinstance(tools, HarmonyParser) else reasoning  # which reads both
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
