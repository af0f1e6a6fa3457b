"""One HTTP connection within bounds: how long its requests' heads may be, and how long a client may take over them."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.http.errors.failures import ABORT, error_body, status_line
from shared.errors import RejectCode, RequestError

MAX_HEADER_BYTES = 64 << 10  # beyond what one read brings, which may be as much again


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose request line and headers have no end, in bytes or in time; the parser itself would gather
    and wait for ever."""

    _in_headers = False
    _num_header_bytes = 0

    def __init__(self, *args: Any, header_timeout: float, **named: Any) -> None:
        super().__init__(*args, **named)
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self._header_timeout = header_timeout
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        super().connection_lost(exc)
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self.send_400_response("The request's headers are too long.")
                return
        super().data_received(data)
        # Whatever has come, the server's own timer for idle connections does not run any more.
        if self._header_timer is None and (self._in_headers or self._is_idle()):
            self._await_head()

    def on_message_begin(self) -> None:
        self._in_headers, self._num_header_bytes = True, 0
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._have_head()
        super().on_headers_complete()

    def _is_idle(self) -> bool:
        return self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete)

    def _await_head(self) -> None:
        self._header_timer = self.loop.call_later(self._header_timeout, self._give_up)

    def _have_head(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if not (self.cycle is None or self.cycle.response_complete):  # a request that came before is still answered
            self._await_head()
            return
        if self._in_headers:
            self.transport.write(too_slow(f"the request's head did not come within {self._header_timeout:g} s"))
        self.transport.close()


def too_slow(reason: str) -> bytes:
    """A whole response."""
    return whole_response(408, error_body(RequestError(reason, code=RejectCode.DEADLINE_EXCEEDED), {}, 408))


def whole_response(status: int, body: bytes, *headers: str) -> bytes:
    """A response that is written where no application has seen the request, and after which the connection ends."""
    lines = (status_line(status), "content-type: application/json", f"content-length: {len(body)}", *headers)
    return "\r\n".join((*lines, "connection: close", "", "")).encode() + body
