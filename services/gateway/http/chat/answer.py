"""One sequence of a chat's answer, as a message or as what is new of one."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from services.gateway.http.chat.objects import AnswerMessage, Function, MessageDelta, ToolCallPart
from services.gateway.http.conversation.reader import call_id
from services.gateway.http.parsing.parts import CallArguments, CallBegun, Content, Part, Reasoning


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
        reasoning = "".join(self._reasoning) if self._reasoning else UNSET
        return AnswerMessage(
            content=content if content or not self._calls else None,
            reasoning_content=reasoning,
            reasoning=reasoning,
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
                    found.append(MessageDelta(reasoning_content=text, reasoning=text))
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
