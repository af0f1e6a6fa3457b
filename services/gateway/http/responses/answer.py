"""One response, which grows item by item, as a whole object or as numbered events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import UNSET
from starlette.types import Scope

from services.gateway.http.answers.answer import finish_reason
from services.gateway.http.answers.events import Events, named_event
from services.gateway.http.answers.objects import TokenLogprob, encode, explanations
from services.gateway.http.conversation.blocks import Block, Blocks, Change, Closed, Grown, Kind, Opened
from services.gateway.http.conversation.form import Conversation
from services.gateway.http.conversation.reader import call_id
from services.gateway.http.requests.gate import Gate
from services.gateway.http.responses.items import ResponseTools, sealed
from services.gateway.http.responses.logprobs import TextLogprobs
from services.gateway.http.responses.objects import (
    IncompleteDetails,
    InputTokensDetails,
    Item,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponsesBody,
    ResponseUsage,
    TextPart,
)
from services.gateway.http.responses.raw import RawMessages
from services.gateway.streams.stream import Stream, StreamDelta
from shared.errors import RejectCode, RequestError
from shared.messages import SequenceText, TokenizeRequest

SEALED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"  # of `include`
PREFIXES = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}
PARTS = {Kind.TEXT: "output_text", Kind.REASONING: "reasoning_text"}
TYPES = {Kind.TEXT: "message", Kind.REASONING: "reasoning", Kind.CALL: "function_call"}
ERROR_CODES = {RejectCode.RESOURCE_EXHAUSTED: "rate_limit_exceeded", RejectCode.INVALID_ARGUMENT: "invalid_prompt"}
NO_MORE: dict[str, Any] = {"parameters": None, "strict": False}  # what a function that does not say has
# Fields of the body that its response has too.
REPEATED = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")
REPEATED_IF_GIVEN = ("user", "safety_identifier", "prompt_cache_key")

Keep = Callable[[ResponseObject], Awaitable[None]]


class ResponseAnswer:
    """Invariant: the last item of the output is the one that grows; each event says what has just been done to it."""

    def __init__(
        self,
        gate: Gate,
        body: ResponsesBody,
        asked: TokenizeRequest,
        conversation: Conversation,
        tools: ResponseTools,
        keep: Keep,
        raw: RawMessages | None = None,
    ) -> None:
        """`keep` is told of the whole response before its client is; `raw`: where the client wants all tokens."""
        self.asked = asked
        self._gate = gate
        self._reader = conversation.reader(gate.formats)
        self._blocks = Blocks()
        self._tools = tools
        self._keep = keep
        self._raw = raw
        self._num_events = 0
        self._body = body
        self._seals = SEALED in (body.include or ())
        self._logprobs = TextLogprobs(gate, body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None
        self._told: list[TokenLogprob] = []  # of the text that grows
        request_id = asked.header.request_id
        self._item_id = request_id[:24]
        self.response = make_response(body, f"resp_{request_id}", gate.model_name(body.model))

    async def whole(self) -> bytes:
        async def consume(_: int, stream: Stream, deltas: list[StreamDelta]) -> None:
            await self._take(stream, deltas)

        await self._gate.run([self.asked], consume)
        return encode(self.response)

    async def write(self, events: Events) -> None:
        async def consume(_: int, stream: Stream, deltas: list[StreamDelta]) -> None:
            begin = [] if events.begun else [self._stage("response.created"), self._stage("response.in_progress")]
            await events.write(b"".join([*begin, *await self._take(stream, deltas)]))

        await self._gate.run([self.asked], consume)

    async def _take(self, stream: Stream, deltas: list[StreamDelta]) -> list[bytes]:
        """Grow by `deltas`; returns the events that say so."""
        said: list[bytes] = []
        for delta in deltas:
            if self._logprobs is not None:
                await stream.before_writing(self._logprobs.take(delta))
            if self._raw is not None:
                self._raw.take(delta)
            changes = self._blocks.take(self._reader.take(stream, delta))
            if delta.end is not None and not self._blocks.all:  # an answer without a word still has its message
                self._blocks.open(Kind.TEXT, changes)
            for change in changes:
                said += self._tell(change)
            if delta.end is not None:
                said += await self._finish(stream, delta.end)
        return said

    def _tell(self, change: Change) -> list[bytes]:
        match change:
            case Opened(block):
                return self._open(block)
            case Grown(block, text):
                return [self._grow(block, text)]
            case Closed(block):
                return self._close(block, "completed")

    def _open(self, block: Block) -> list[bytes]:
        item = Item(type=TYPES[block.kind], id=f"{PREFIXES[block.kind]}_{self._item_id}{block.place:x}")
        self.response.output.append(item)
        if block.kind is Kind.CALL:
            namespace, item.name = self._tools.names(block.name)
            item.namespace = namespace or UNSET
            item.call_id, item.arguments = call_id(), ""
            return [self._event("response.output_item.added", output_index=block.place, item=item)]
        item.content, self._told = [], []
        if block.kind is Kind.TEXT:
            item.role = "assistant"
        else:
            item.summary = []
        return [
            self._event("response.output_item.added", output_index=block.place, item=item),
            self._event("response.content_part.added", **self._place(), content_index=0, part=_part(block.kind, "")),
        ]

    def _grow(self, block: Block, text: str) -> bytes:
        logprobs = [] if self._logprobs is None else self._logprobs.of(text)
        self._told += logprobs
        match block.kind:
            case Kind.CALL:
                return self._event("response.function_call_arguments.delta", **self._place(), delta=text)
            case Kind.TEXT:
                more: dict[str, Any] = {"content_index": 0, "delta": text, "logprobs": logprobs}
                return self._event("response.output_text.delta", **self._place(), **more)
        return self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

    def _close(self, block: Block, status: str) -> list[bytes]:
        item, text, place = self.response.output[-1], block.text, self._place()
        item.status = status
        if block.kind is Kind.CALL:
            item.arguments = text
            said = [self._event("response.function_call_arguments.done", **place, arguments=text)]
        else:
            part = _part(block.kind, text, self._told)
            item.content = [part]
            if block.kind is Kind.REASONING and self._seals:
                item.encrypted_content = sealed(text)
            more: dict[str, Any] = {"logprobs": self._told} if block.kind is Kind.TEXT else {}
            said = [
                self._event(f"response.{part.type}.done", **place, content_index=0, text=text, **more),
                self._event("response.content_part.done", **place, content_index=0, part=part),
            ]
        return [*said, self._event("response.output_item.done", output_index=block.place, item=item)]

    async def _finish(self, stream: Stream, end: SequenceText) -> list[bytes]:
        response, is_cut = self.response, finish_reason(end) == "length"
        response.status = "incomplete" if is_cut else "completed"
        response.incomplete_details = IncompleteDetails("max_output_tokens") if is_cut else None
        changes: list[Change] = []
        self._blocks.close(changes)
        said = [one for change in changes for one in self._close(change.block, response.status)]
        num_prompt, num_output = stream.num_prompt_tokens, stream.num_output_tokens
        response.usage = ResponseUsage(
            num_prompt,
            InputTokensDetails(stream.num_cached_tokens),
            num_output,
            OutputTokensDetails(stream.num_reasoning_tokens or 0),
            num_prompt + num_output,
        )
        response.completed_at = None if is_cut else int(time.time())
        response.explanations = explanations([stream], self._body.explain)
        if self._raw is not None:
            await self._raw.tell(response)
        await self._keep(response)
        return [*said, self._stage(f"response.{response.status}")]

    def fail(self, error: RequestError, _: Scope) -> bytes:
        """The last event of a stream that has begun and cannot go on."""
        self.response.status = "cancelled" if error.code is RejectCode.CANCELLED else "failed"
        self.response.error = ResponseError(ERROR_CODES.get(error.code, "server_error"), str(error))
        return self._stage("response.failed")

    def _place(self) -> dict[str, Any]:
        output = self.response.output
        return {"item_id": output[-1].id, "output_index": len(output) - 1}

    def _stage(self, name: str) -> bytes:
        return self._event(name, response=self.response)

    def _event(self, name: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(name, encode({"type": name, "sequence_number": number, **fields}))


def make_response(body: ResponsesBody, response_id: str, model: str) -> ResponseObject:
    """As it is before its first word."""
    text: dict[str, Any] = {"format": (body.text.format if body.text else None) or {"type": "text"}}
    if body.text is not None and body.text.verbosity is not None:
        text["verbosity"] = body.text.verbosity
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        model=model,
        output=[],
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        store=False,
        text=text,
        top_logprobs=body.top_logprobs or 0,
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=[NO_MORE | tool if tool.get("type") == "function" else tool for tool in body.tools or ()],
        **{name: getattr(body, name) for name in REPEATED},
        **{name: value for name in REPEATED_IF_GIVEN if (value := getattr(body, name)) is not None},
    )


def _part(kind: Kind, text: str, logprobs: Sequence[TokenLogprob] = ()) -> TextPart:
    part = TextPart(type=PARTS[kind], text=text)
    if kind is Kind.TEXT:
        part.annotations, part.logprobs = [], list(logprobs)
    return part
