"""One sequence of a chat's answer: its text read by the parsers, as a message or as what is new of one."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from msgspec import UNSET

from services.gateway.http.chat.objects import AnswerMessage, Function, MessageDelta, ToolCallPart
from services.gateway.http.parsing.parts import CallArguments, CallBegun, Content, Part, Reasoning
from services.gateway.http.parsing.registry import OutputParser


class AnswerReader:
    """Feeds one sequence's text to its parser and counts the calls in it.

    A message is what its deltas add up to, because both are made of the same parts.
    """

    def __init__(self, parser: OutputParser, *, parallel: bool, reasoning: bool) -> None:
        """`parallel`: whether the answer may have several calls, `reasoning`: whether it has the reasoning."""
        self._parser = parser
        self._parallel = parallel
        self._reasoning = reasoning
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        return self._allowed(self._parser.feed(text))

    def finish(self) -> list[Part]:
        return self._allowed(self._parser.finish())

    def _allowed(self, parts: Iterable[Part]) -> list[Part]:
        """Without what is not wanted: the calls after the first, or what the model thought."""
        found = []
        for part in parts:
            self.num_calls += isinstance(part, CallBegun)
            if isinstance(part, Reasoning) and not self._reasoning:
                continue
            if self._parallel or self.num_calls < 2 or not isinstance(part, CallBegun | CallArguments):
                found.append(part)
        return found


class MessageBuilder:
    """Adds parts up to a whole message."""

    def __init__(self, shown: str = "") -> None:
        """`shown`: what the message begins with, before anything was made of it."""
        self._content = [shown] if shown else []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallBegun(name):
                    self._calls.append((name, []))
                case CallArguments(text):
                    self._calls[-1][1].append(text)

    @property
    def message(self) -> AnswerMessage:
        content = "".join(self._content)
        return AnswerMessage(
            content=content if content or not self._calls else None,
            reasoning_content="".join(self._reasoning) if self._reasoning else UNSET,
            tool_calls=[_call(name, arguments) for name, arguments in self._calls] or UNSET,
        )


class DeltaBuilder:
    """Turns parts into the deltas of a stream, as few as say everything in order."""

    def __init__(self) -> None:
        self._index = -1  # of the call under way

    def deltas(self, parts: Iterable[Part]) -> list[MessageDelta]:
        found: list[MessageDelta] = []
        for part in parts:
            match part:
                case Content(text):
                    found.append(MessageDelta(content=text))
                case Reasoning(text):
                    found.append(MessageDelta(reasoning_content=text))
                case CallBegun(name):
                    self._index += 1
                    call = ToolCallPart(index=self._index, id=call_id(), type="function", function=Function(name=name))
                    found.append(MessageDelta(tool_calls=[call]))
                case CallArguments(text):
                    call = ToolCallPart(index=self._index, function=Function(arguments=text))
                    found.append(MessageDelta(tool_calls=[call]))
        return found


def _call(name: str, arguments: list[str]) -> ToolCallPart:
    return ToolCallPart(id=call_id(), type="function", function=Function(name=name, arguments="".join(arguments)))


def call_id() -> str:
    """As OpenAI writes them; also nine or more letters and digits, as Mistral's templates want."""
    return f"call_{uuid.uuid4().hex[:24]}"
