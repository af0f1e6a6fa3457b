"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.answers.events import EventResponse, WholeResponse
from services.gateway.http.answers.objects import json_response
from services.gateway.http.messages.answer import MessageAnswer, failure_event
from services.gateway.http.messages.objects import MessagesBody, MessagesPrompt, TokenCount
from services.gateway.http.messages.reading import conversation_of, sampling_of
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.reading import field_error
from services.gateway.http.requests.returning import refuse_position
from shared.messages import TokenizeRequest

VERSION_HEADER = "anthropic-version"
FIRST_VERSION = "2023-06-01"  # what an older one answers has another form
VERSION = re.compile(r"20\d\d-\d\d-\d\d")


class Messages:
    """The endpoints."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def post(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, MessagesBody)
        _check_version(request)
        gate = self._gate.choose(body.model)
        refuse_position(request, "a message")
        await gate.formats.learn()
        conversation = conversation_of(body, gate.formats)
        request.state.message_names = conversation.names
        header = gate.header(request, label=body.request_id, priority=body.priority)
        params = gate.seeded(sampling_of(body, conversation, closes=gate.closes_formats), request, header)
        asked = TokenizeRequest(header, params, chat=conversation.messages, chat_options=conversation.options)
        answer = MessageAnswer(gate, body, asked, conversation)
        headers = {"x-request-id": header.request_id, "request-id": header.request_id}
        if body.stream:
            return EventResponse(answer.write, headers, failure_event)
        return WholeResponse(answer.whole, headers)

    async def count(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, MessagesPrompt)
        _check_version(request)
        gate = self._gate.choose(body.model)
        await gate.formats.learn()
        conversation = conversation_of(body, gate.formats)
        request.state.message_names = conversation.names
        ids = await gate.encode(request, chat=conversation.messages, options=conversation.options)
        return json_response(TokenCount(len(ids)))


def _check_version(request: Request) -> None:
    given = request.headers.get(VERSION_HEADER, FIRST_VERSION)
    if not VERSION.fullmatch(given) or given < FIRST_VERSION:
        raise field_error(VERSION_HEADER, f"must be {FIRST_VERSION} or later, got {given[:32]!r}")
