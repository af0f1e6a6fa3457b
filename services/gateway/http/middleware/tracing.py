"""Passes a caller's trace on: who sent a `traceparent` gets one back, of the same trace and with our span."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access.header import SPAN_DIGITS, read_metadata

TRACEPARENT = "traceparent"
REQUEST_ID = "x-request-id"


class TraceHeader:
    """Middleware; the span's id is the beginning of the request's, as in logs and exports."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(TRACEPARENT, "") if scope["type"] == "http" else ""
        call = read_metadata([(TRACEPARENT, given)])
        if not call.parent_span_id:
            await self._app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if request_id := headers.get(REQUEST_ID):
                    headers[TRACEPARENT] = f"00-{call.trace_id}-{request_id[:SPAN_DIGITS]}-01"
            await send(message)

        await self._app(scope, receive, told)
