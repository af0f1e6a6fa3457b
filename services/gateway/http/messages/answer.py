"""One message, which grows block by block, as a whole object or as Anthropic's events."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from typing import Any

from msgspec import UNSET
from starlette.types import Scope

from services.gateway.http.answers.answer import finish_reason
from services.gateway.http.answers.events import Events, named_event
from services.gateway.http.answers.objects import encode, explanations, stop_reason
from services.gateway.http.conversation.blocks import Block, Blocks, Change, Closed, Grown, Kind, Opened
from services.gateway.http.conversation.form import Conversation
from services.gateway.http.errors.failures import error_body
from services.gateway.http.messages.objects import (
    AnsweredMessage,
    MessagesBody,
    MessageUsage,
    OutputBlock,
    ThinkingTokens,
)
from services.gateway.http.messages.partial import object_of
from services.gateway.http.requests.gate import Gate
from services.gateway.streams.stream import Stream, StreamDelta
from shared.errors import RequestError
from shared.messages import SequenceText, TokenizeRequest

PING = named_event("ping", encode({"type": "ping"}))
STOP = named_event("message_stop", encode({"type": "message_stop"}))


class MessageAnswer:
    """Grows by what the model writes; each event says what has just been done."""

    def __init__(self, gate: Gate, body: MessagesBody, asked: TokenizeRequest, conversation: Conversation) -> None:
        self._gate = gate
        self._body = body
        self._asked = asked
        self._reader = conversation.reader(gate.formats)
        self._blocks = Blocks()
        self._request_id = asked.header.request_id

    async def whole(self) -> bytes:
        output = StreamDelta(0)

        async def consume(_: int, stream: Stream, deltas: list[StreamDelta]) -> None:
            for delta in deltas:
                self._changes(stream, delta)
                output.end = delta.end

        (stream,) = await self._gate.run([self._asked], consume)
        assert output.end is not None  # or `run` would have raised
        message = self._message(stream)
        message.content = [self._whole(block) for block in self._blocks.all]
        message.stop_reason, message.stop_sequence = self._reasons(stream, output.end)
        message.explanations = explanations([stream], self._body.explain)
        return encode(message)

    async def write(self, events: Events) -> None:
        async def consume(_: int, stream: Stream, deltas: list[StreamDelta]) -> None:
            said = []
            if not events.begun:
                message = self._message(stream)
                message.usage.output_tokens = 0  # none of them is said yet
                said = [_event("message_start", message=message), PING]
            for delta in deltas:
                said += [one for change in self._changes(stream, delta) for one in self._tell(change)]
                if delta.end is not None:
                    said += [self._finish(stream, delta.end), STOP]
            await events.write(b"".join(said))

        await self._gate.run([self._asked], consume)

    def _changes(self, stream: Stream, delta: StreamDelta) -> list[Change]:
        changes = self._blocks.take(self._reader.take(stream, delta))
        if delta.end is not None:
            self._blocks.close(changes)
        return changes

    def _tell(self, change: Change) -> list[bytes]:
        place = change.block.place
        match change:
            case Opened(block):
                return [_event("content_block_start", index=place, content_block=self._empty(block))]
            case Grown(block, text):
                return [_event("content_block_delta", index=place, delta=_delta(block, text))]
            case Closed(block):
                stop = _event("content_block_stop", index=place)
                if block.kind is not Kind.REASONING:
                    return [stop]
                delta = {"type": "signature_delta", "signature": signature(block.text)}
                return [_event("content_block_delta", index=place, delta=delta), stop]

    def _empty(self, block: Block) -> OutputBlock:
        match block.kind:
            case Kind.CALL:
                return OutputBlock(type="tool_use", id=self._id_of(block), name=block.name, input={})
            case Kind.REASONING:
                return OutputBlock(type="thinking", thinking="", signature="")
        return OutputBlock(type="text", text="", citations=None)

    def _whole(self, block: Block) -> OutputBlock:
        found = self._empty(block)
        match block.kind:
            case Kind.CALL:
                found.input = object_of(block.text)
            case Kind.REASONING:
                found.thinking, found.signature = block.text, signature(block.text)
            case Kind.TEXT:
                found.text = block.text
        return found

    def _id_of(self, block: Block) -> str:
        return f"toolu_{self._request_id[:20]}{block.place:04x}"

    def _message(self, stream: Stream) -> AnsweredMessage:
        return AnsweredMessage(
            id=f"msg_{self._request_id}",
            model=self._gate.model_name(self._body.model),
            content=[],
            usage=_usage(stream),
        )

    def _finish(self, stream: Stream, end: SequenceText) -> bytes:
        reason, sequence = self._reasons(stream, end)
        more: dict[str, Any] = {}
        if found := explanations([stream], self._body.explain):
            more["explanations"] = found
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=delta, usage=_usage(stream), **more)

    def _reasons(self, stream: Stream, end: SequenceText) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        if finish_reason(end) == "length":
            is_own = stream.num_output_tokens >= self._body.max_tokens
            return "max_tokens" if is_own else "model_context_window_exceeded", None
        if isinstance(text := stop_reason(stream, end.stop_reason), str):
            return "stop_sequence", text
        return "tool_use" if self._reader.num_calls else "end_turn", None


def signature(text: str) -> str:
    """A digest of the reasoning: clients keep blocks that have one only.  It is not checked when it comes back."""
    return b64encode(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=24).digest()).decode()


def _delta(block: Block, text: str) -> dict[str, str]:
    match block.kind:
        case Kind.CALL:
            return {"type": "input_json_delta", "partial_json": text}
        case Kind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _usage(stream: Stream) -> MessageUsage:
    cached = stream.num_cached_tokens
    return MessageUsage(
        input_tokens=stream.num_prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=stream.num_output_tokens,
        output_tokens_details=UNSET if (count := stream.num_reasoning_tokens) is None else ThinkingTokens(count),
    )


def failure_event(error: RequestError, scope: Scope) -> bytes:
    """The last event of a message that has begun and cannot go on."""
    return named_event("error", error_body(error, scope))


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, encode({"type": name, **fields}))
