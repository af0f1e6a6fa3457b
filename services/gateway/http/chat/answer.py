"""One sequence of a chat's answer, as a message or as what is new of one."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from services.gateway.http.answers.objects import given
from services.gateway.http.chat.objects import AnswerMessage, Function, MessageDelta, ToolCallPart
from services.gateway.http.conversation.blocks import Blocks, Kind
from services.gateway.http.conversation.reader import call_id
from services.gateway.http.parsing.reading.parts import CallArguments, CallBegun, Content, Part, Reasoning


def message_of(parts: Iterable[Part], shown: str = "") -> AnswerMessage:
    """A whole message; `shown`: what it begins with, before anything was made of it."""
    blocks = Blocks()
    blocks.take(parts)
    texts = {kind: [block.text for block in blocks.all if block.kind is kind] for kind in Kind}
    content, reasoning = "".join([shown, *texts[Kind.TEXT]]), "".join(texts[Kind.REASONING])
    calls = [_call(block.name, block.text) for block in blocks.all if block.kind is Kind.CALL]
    return AnswerMessage(
        content=content if content or not calls else None,
        reasoning_content=given(reasoning, texts[Kind.REASONING]),
        reasoning=given(reasoning, texts[Kind.REASONING]),
        tool_calls=calls or UNSET,
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


def _call(name: str, arguments: str) -> ToolCallPart:
    return ToolCallPart(id=call_id(), type="function", function=Function(name=name, arguments=arguments))
