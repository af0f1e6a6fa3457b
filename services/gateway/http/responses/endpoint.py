"""/v1/responses, its text part: messages in, the assistant's message (and what it thought before) out."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.answers.answer import Identity, finish_reason
from services.gateway.http.answers.events import EventResponse, Events, WholeResponse, named_event
from services.gateway.http.answers.objects import encode, explanations
from services.gateway.http.chat.objects import MessageBody
from services.gateway.http.chat.prompt import read_messages
from services.gateway.http.parsing.parts import Content, Part, Reasoning
from services.gateway.http.parsing.registry import OutputParser, make_reasoning_parser
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.output_format import response_format
from services.gateway.http.requests.returning import POSITION_HEADER, positions_of
from services.gateway.http.responses.objects import (
    IncompleteDetails,
    InputItem,
    InputTokensDetails,
    Item,
    OutputTokensDetails,
    ResponseObject,
    ResponsesBody,
    ResponseUsage,
    TextPart,
)
from services.gateway.streams.stream import Stream, StreamDelta
from shared.errors import RequestError
from shared.messages import ChatOptions, SequenceText, TokenizeRequest
from shared.sampling import SamplingParams

NOT_POSSIBLE = {
    "tools": "calling tools here (/v1/chat/completions can)",
    "previous_response_id": "going on from a stored response",
    "conversation": "stored conversations",
    "background": "answering in the background",
    "background_options": "answering in the background",
    "prompt": "stored prompts",
    "include": "including more output",
    "max_tool_calls": "calling tools here (/v1/chat/completions can)",
    "top_logprobs": "log-probabilities here (/v1/chat/completions has them)",
    "moderation": "moderation",
    "context_management": "compaction",
    "access_programs": "access programs",
    "image": "images",
    "mm_processor_kwargs": "input that is not text",
    "cache_salt": "a cache of one's own (the server derives one from the tenant)",
}


class Responses:
    """The endpoint.  Nothing is stored: `store` is accepted and answered with false."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def post(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, ResponsesBody)
        self._gate.check_model(body.model)
        _check(body)
        asked = self._request(request, body)
        if positions_of(request, 1) is not None:
            raise RequestError(
                f"{POSITION_HEADER} is not supported here: a response is sent again from its start only",
                field=POSITION_HEADER,
            )
        headers = {"x-request-id": asked.header.request_id}
        answer = ResponseAnswer(self._gate, body, asked)
        if body.stream:
            return EventResponse(answer.write, headers)
        return WholeResponse(answer.whole, headers)

    def _request(self, request: Request, body: ResponsesBody) -> TokenizeRequest:
        messages = read_messages(_messages(body), body.message_name)
        params = SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            max_tokens=body.max_output_tokens,
            grammar=response_format(
                body.text.format if body.text else None, "text.format", closes=self._gate.closes_formats
            ),
        )
        effort = body.reasoning.effort if body.reasoning else None
        options = ChatOptions(template_args=encode({"reasoning_effort": effort}).decode()) if effort else None
        header = self._gate.header(request, label=body.request_id, priority=body.priority)
        return TokenizeRequest(header, self._gate.seeded(params, request, header), chat=messages, chat_options=options)


class ResponseAnswer:
    """One response, which grows item by item.

    Invariant: the last item is the one that grows; each event says what has just been done to it.
    """

    def __init__(self, gate: Gate, body: ResponsesBody, asked: TokenizeRequest) -> None:
        self._gate = gate
        self._asked = asked
        self._parser = OutputParser(make_reasoning_parser(gate.settings.gateway.reasoning_parser), None)
        self._texts: list[str] = []  # of the item that grows
        self._num_events = 0
        identity = Identity("resp", gate.settings.engine.model_name)
        self._explain = body.explain
        self._response = ResponseObject(
            id=identity.id,
            created_at=identity.created,
            model=identity.model,
            output=[],
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            temperature=body.temperature,
            text={"format": body.text.format if body.text and body.text.format else {"type": "text"}},
            top_p=body.top_p,
            user=body.user,
        )

    async def whole(self) -> bytes:
        async def consume(_: int, stream: Stream, deltas: list[StreamDelta]) -> None:
            self._take(stream, deltas)

        await self._gate.run([self._asked], consume)
        return encode(self._response)

    async def write(self, events: Events) -> None:
        async def consume(_: int, stream: Stream, deltas: list[StreamDelta]) -> None:
            begin = [] if events.begun else [self._stage("response.created"), self._stage("response.in_progress")]
            await events.write(b"".join([*begin, *self._take(stream, deltas)]))

        await self._gate.run([self._asked], consume)

    def _take(self, stream: Stream, deltas: list[StreamDelta]) -> list[bytes]:
        """Grow by `deltas`; returns the events that say so."""
        said: list[bytes] = []
        for delta in deltas:
            parts = self._parser.feed("".join(delta.text))
            if delta.end is not None:
                parts = parts + self._parser.finish()
            for part in parts:
                said += self._grow(part)
            if delta.end is not None:
                said += self._finish(stream, delta.end)
        return said

    def _grow(self, part: Part) -> list[bytes]:
        assert isinstance(part, Content | Reasoning)  # no tools are offered here
        kind = "reasoning" if isinstance(part, Reasoning) else "message"
        said = []
        if not self._response.output or self._response.output[-1].type != kind:
            said += self._close_item("completed") + self._open_item(kind)
        self._texts.append(part.text)
        more: dict[str, Any] = {"delta": part.text, "content_index": 0}
        if kind == "message":
            more["logprobs"] = []
        said.append(self._event(f"response.{_part_type(kind)}.delta", **self._place(), **more))
        return said

    def _open_item(self, kind: str) -> list[bytes]:
        item = Item(type=kind, id=f"{PREFIXES[kind]}_{uuid.uuid4().hex}", content=[])
        if kind == "message":
            item.role = "assistant"
        else:
            item.summary = []
        self._response.output.append(item)
        added = self._event("response.output_item.added", output_index=self._place()["output_index"], item=item)
        part = self._event("response.content_part.added", **self._place(), content_index=0, part=_text_part(kind, ""))
        return [added, part]

    def _close_item(self, status: str) -> list[bytes]:
        if not self._response.output:
            return []
        item, text = self._response.output[-1], "".join(self._texts)
        self._texts = []
        part = _text_part(item.type, text)
        item.content, item.status = [part], status
        more: dict[str, Any] = {"logprobs": []} if item.type == "message" else {}
        place = self._place()
        done = self._event(f"response.{part.type}.done", **place, content_index=0, text=text, **more)
        part_done = self._event("response.content_part.done", **place, content_index=0, part=part)
        return [
            done,
            part_done,
            self._event("response.output_item.done", output_index=place["output_index"], item=item),
        ]

    def _finish(self, stream: Stream, end: SequenceText) -> list[bytes]:
        """The end; an answer without a word still has its message."""
        said = [] if self._response.output else self._open_item("message")
        cut = finish_reason(end) == "length"
        response = self._response
        response.status = "incomplete" if cut else "completed"
        response.incomplete_details = IncompleteDetails("max_output_tokens") if cut else None
        said += self._close_item(response.status)
        num_prompt, num_output = stream.num_prompt_tokens, stream.num_output_tokens
        response.usage = ResponseUsage(
            num_prompt,
            InputTokensDetails(stream.num_cached_tokens),
            num_output,
            OutputTokensDetails(),
            num_prompt + num_output,
        )
        response.explanations = explanations([stream], self._explain)
        return [*said, self._stage(f"response.{response.status}")]

    def _place(self) -> dict[str, Any]:
        output = self._response.output
        return {"item_id": output[-1].id, "output_index": len(output) - 1}

    def _stage(self, name: str) -> bytes:
        return self._event(name, response=self._response)

    def _event(self, name: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(name, encode({"type": name, "sequence_number": number, **fields}))


PREFIXES = {"message": "msg", "reasoning": "rs"}


def _part_type(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


def _text_part(kind: str, text: str) -> TextPart:
    part = TextPart(type=_part_type(kind), text=text)
    if kind == "message":
        part.annotations, part.logprobs = [], []
    return part


def _check(body: ResponsesBody) -> None:
    for name, what in NOT_POSSIBLE.items():
        if getattr(body, name):
            raise RequestError(f"{name}: {what} is not supported by this server", field=name)
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestError("tool_choice can only be auto or none: there are no tools here", field="tool_choice")
    if body.truncation not in (None, "disabled"):
        raise RequestError("truncation can only be disabled", field="truncation")


def _messages(body: ResponsesBody) -> Sequence[MessageBody]:
    first = [MessageBody(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*first, MessageBody(role="user", content=body.input)]
    return [*first, *(_message(item, place) for place, item in enumerate(body.input))]


def _message(item: InputItem, place: int) -> MessageBody:
    if item.type != "message" or item.role is None:
        field = f"input[{place}]"
        raise RequestError(f"{field} is of type {item.type[:32]!r}; only messages can be read", field=field)
    return MessageBody(role=item.role, content=item.content)
