"""/v1/responses: items in, items out; what is stored can be read, deleted, and gone on from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.answers.events import EventResponse, WholeResponse
from services.gateway.http.answers.objects import encode, json_response
from services.gateway.http.conversation.form import Conversation
from services.gateway.http.conversation.objects import ContentPart
from services.gateway.http.conversation.prompt import ToolUse
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.output_format import response_format
from services.gateway.http.requests.reading import check_content_type, field_error, read_number
from services.gateway.http.requests.returning import refuse_position
from services.gateway.http.requests.sampling import NOTHING, refuse_impossible
from services.gateway.http.responses.answer import LOGPROBS, SEALED, ResponseAnswer
from services.gateway.http.responses.inputs import InputItem
from services.gateway.http.responses.items import ResponseTools
from services.gateway.http.responses.objects import (
    DeletedResponse,
    InputItems,
    ResponseObject,
    ResponsesBody,
    turns_of,
)
from services.gateway.http.responses.raw import RawMessages
from services.gateway.http.responses.store import ResponseStore, StoredResponse
from shared.errors import RejectCode, RequestError
from shared.messages import RequestHeader, TokenizeRequest
from shared.requests.sampling import SamplingParams

log = structlog.get_logger()

QUERY = ("stream", "starting_after")  # of GET, which are not possible here
MAX_PAGE = 100  # items


class Responses:
    """The endpoints."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._running: dict[tuple[str, str], ResponseAnswer] = {}  # by tenant and id
        settings, given = gate.settings.gateway, gate.settings.gateway.response_dir
        directory = Path(given) if given else gate.settings.deployment.runtime_path / "responses"
        self._store = ResponseStore(directory, settings.response_ttl, settings.max_response_bytes)

    async def post(self, request: Request) -> Response:
        body = await self._gate.bodies.read(request, ResponsesBody)
        gate = self._gate.choose(body.model)
        _check(body)
        await gate.formats.learn()
        refuse_position(request, "a response")
        header = gate.header(request, label=body.request_id, priority=body.priority)
        before = await self._before(header.tenant, body)
        tools = ResponseTools(body.tools or [], body.tool_choice)
        conversation = self._conversation(gate, body, before, tools)
        request.state.message_names = conversation.names
        params = gate.seeded(_params(body, conversation, closes=gate.closes_formats), request, header)
        asked, raw = (
            TokenizeRequest(header, params, chat=conversation.messages, chat_options=conversation.options),
            None,
        )
        if body.enable_response_messages:
            ids = await gate.encode(request, chat=conversation.messages, options=conversation.options)
            raw = RawMessages(gate, request, ids)
            asked = TokenizeRequest(header, gate.up_to_the_end(params, len(ids)), token_ids=gate.pack(ids))

        async def keep(response: ResponseObject) -> None:
            await self._keep(header, response, before, body.items)

        answer = ResponseAnswer(gate, body, asked, conversation, tools, keep, raw)
        answer.response.store = body.store is not False and self._store.keeps
        headers = {"x-request-id": header.request_id}
        if body.stream:
            return EventResponse(lambda events: self._while_running(answer, answer.write(events)), headers, answer.fail)
        return WholeResponse(lambda: self._while_running(answer, answer.whole()), headers)

    async def get(self, request: Request) -> Response:
        """A stored response, or one that runs at this gateway, as far as it is."""
        for field in QUERY:
            if request.query_params.get(field, "false").lower() != "false":
                raise RequestError(f"{field}: a stored response is not streamed again", field=field)
        name = self._name(request)
        if (running := self._running.get(name)) is not None:
            return json_response(running.response)
        return json_response((await self._stored(name)).response)

    async def items(self, request: Request) -> Response:
        """What a stored response was made from, newest first unless `order` is asc."""
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise field_error("order", f"must be asc or desc, got {order[:32]!r}")
        limit = read_number(query.get("limit", "20"), "limit", 1, MAX_PAGE)
        name = self._name(request)
        record = await self._stored(name)
        items = _named([*record.before, *record.input], name[1])
        if order == "desc":
            items.reverse()
        after = query.get("after")
        if after is not None:
            places = [place for place, item in enumerate(items) if item.id == after]
            if not places:
                raise RequestError(f"after: there is no item {after[:64]!r}", field="after")
            items = items[places[0] + 1 :]
        page = items[:limit]
        ends = (page[0].id, page[-1].id) if page else (None, None)
        return json_response(InputItems(data=page, first_id=ends[0], last_id=ends[1], has_more=len(page) < len(items)))

    async def delete(self, request: Request) -> Response:
        tenant, response_id = self._name(request)
        if not await asyncio.to_thread(self._store.delete, tenant, response_id):
            raise _unknown(response_id)
        return json_response(DeletedResponse(id=response_id))

    async def cancel(self, request: Request) -> Response:
        """End a response that runs at this gateway."""
        if "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0":
            check_content_type(request)  # as everywhere: what a page of another origin can send is refused
        name = self._name(request)
        answer = self._running.get(name)
        if answer is None:
            stored = await self._stored(name)
            status = msgspec.json.decode(stored.response, type=_Status).status
            raise RequestError(f"the response is {status}, and cannot be cancelled", field="response_id")
        self._gate.abort(answer.asked.header.request_id, name[0])
        return json_response(msgspec.structs.replace(answer.response, status="cancelled"))

    # -- what a body asks for

    def _conversation(
        self, gate: Gate, body: ResponsesBody, before: Sequence[InputItem], tools: ResponseTools
    ) -> Conversation:
        turns = turns_of(body, before)
        messages = turns.messages
        effort = body.reasoning.effort if body.reasoning else None
        variables = {"reasoning_effort": effort} if effort else {}
        return Conversation(
            messages=messages,
            names=turns.names,
            tools=ToolUse(
                gate.formats,
                tools.chat_tools,
                tools.choice,
                parallel=body.parallel_tool_calls is not False,
                variables=variables,
                said=messages,
            ),
            variables=variables,
        )

    async def _before(self, tenant: str, body: ResponsesBody) -> list[InputItem]:
        if body.previous_response_id is None:
            return []
        record = await asyncio.to_thread(self._store.get, tenant, body.previous_response_id)
        if record is None:
            raise RequestError(
                f"there is no stored response {body.previous_response_id[:64]!r}: it was not stored, was deleted, or "
                "is older than response_ttl",
                field="previous_response_id",
                reason="previous_response_not_found",
            )
        return record.conversation

    # -- the store

    async def _while_running(self, answer: ResponseAnswer, work: Any) -> Any:
        name = (answer.asked.header.tenant, answer.response.id)
        self._running[name] = answer
        try:
            return await work
        finally:
            if self._running.get(name) is answer:
                del self._running[name]

    async def _keep(
        self, header: RequestHeader, response: ResponseObject, before: list[InputItem], items: list[InputItem]
    ) -> None:
        if not response.store:
            return
        try:
            record = StoredResponse(msgspec.Raw(encode(response)), before, items)
            await asyncio.to_thread(self._store.put, header.tenant, response.id, record)
        except OSError as error:  # its client has the answer, and reads that it was not stored
            response.store = False
            log.warning("response_not_stored", request_id=header.request_id, reason=str(error))

    async def _stored(self, name: tuple[str, str]) -> StoredResponse:
        record = await asyncio.to_thread(self._store.get, *name)
        if record is None:
            raise _unknown(name[1])
        return record

    def _name(self, request: Request) -> tuple[str, str]:
        tenant = self._gate.caller(request).tenant
        return tenant, request.path_params["response_id"]


class _Status(msgspec.Struct):
    status: str


def _params(body: ResponsesBody, conversation: Conversation, *, closes: bool) -> SamplingParams:
    given: dict[str, Any] = {
        "grammar": response_format(body.text.format if body.text else None, "text.format", closes=closes),
        **conversation.sampling,
    }
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
        **given,
    )


def _check(body: ResponsesBody) -> None:
    refuse_impossible(body, nothing=(*NOTHING, []))
    if others := [name for name in body.include or () if name not in (SEALED, LOGPROBS)]:
        raise RequestError(f"include: {others[0][:64]!r} is not supported by this server", field="include")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise field_error("top_logprobs", f"can only be given with {LOGPROBS} in include")
    if body.truncation not in (None, "disabled"):
        raise field_error("truncation", "can only be disabled")


def _named(items: Sequence[InputItem], response_id: str) -> list[InputItem]:
    """As a list of items has them: with an id, and with parts where a text alone was sent."""
    found = []
    for place, item in enumerate(items):
        item_id = item.id or f"item_{response_id.removeprefix('resp_')[:24]}{place:x}"
        content = item.content
        if isinstance(content, str):
            content = [ContentPart(type="output_text" if item.role == "assistant" else "input_text", text=content)]
        found.append(msgspec.structs.replace(item, id=item_id, content=content))
    return found


def _unknown(response_id: str) -> RequestError:
    return RequestError(
        f"there is no stored response {response_id[:64]!r}", code=RejectCode.NOT_FOUND, field="response_id"
    )
