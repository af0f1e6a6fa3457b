"""One line of a batch as a request: it passes the same routes and the same gate, without a connection."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
import structlog
from starlette.types import ASGIApp, Message, Scope

from services.gateway.access.header import CallMetadata
from services.gateway.http.requests.gate import CALLER

log = structlog.get_logger()

RETRIED = frozenset({429, 503})  # what may be otherwise a moment later
RETRIED_A_FEW_TIMES = frozenset({500, 502, 504})
FEW_TIMES = 3
NO_ANSWER = b'{"error":{"message":"the server has failed at this request","type":"server_error"}}'


@dataclass(frozen=True)
class LineAnswer:
    """What came back, and in how many seconds it may be asked again (0: it does not say)."""

    status: int
    request_id: str
    body: bytes
    retry_after: float = 0.0

    def may_be_retried(self, num_tries: int) -> bool:
        """Whether another try may end otherwise, after so many."""
        return self.status in RETRIED or (self.status in RETRIED_A_FEW_TIMES and num_tries < FEW_TIMES)


class LineCall:
    """Asks an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, path: str, body: bytes, tenant: str) -> LineAnswer:
        """The answer to a POST of the tenant.  Being cancelled ends the request."""
        exchange = _Exchange(body)
        try:
            await self._app(_scope(path, body, tenant), exchange.receive, exchange.send)
        except Exception as error:  # the application has said so already, by the status 500
            log.error("batch_line_failed_unexpectedly", path=path, exc_info=error)
            return LineAnswer(HTTPStatus.INTERNAL_SERVER_ERROR, "", NO_ANSWER)
        return exchange.answer()


class _Exchange:
    """One request's messages."""

    def __init__(self, body: bytes) -> None:
        self._requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()

    async def receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await never  # the client stays

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = dict(message["headers"])
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")

    def answer(self) -> LineAnswer:
        try:
            body = msgspec.json.encode(msgspec.json.decode(self._body))  # one line, whatever came
        except (msgspec.DecodeError, UnicodeError):
            body = NO_ANSWER
        wait = self._headers.get(b"retry-after-ms", b"0")
        seconds = int(wait) / 1000 if wait.isdigit() else 0.0
        return LineAnswer(self._status, self._headers.get(b"x-request-id", b"").decode("latin-1"), body, seconds)


def _scope(path: str, body: bytes, tenant: str) -> Scope:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
        CALLER: CallMetadata(tenant, uuid.uuid4().hex, is_background=True),
    }
