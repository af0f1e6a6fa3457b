"""Adds how loaded the deployment is to the answers of those who ask for it."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.health.load_report import ANSWER, ASKED, LoadReports

PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})


class LoadHeader:
    """Middleware around the endpoints that generate."""

    def __init__(self, app: ASGIApp, reports: LoadReports) -> None:
        self._app = app
        self._reports = reports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = Headers(scope=scope).get(ASKED, "") if scope["type"] == "http" and scope["path"] in PATHS else ""
        if not wanted:
            await self._app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._reports.refresh()
                if header := self._reports.header(wanted):
                    MutableHeaders(scope=message)[ANSWER] = header
            await send(message)

        await self._app(scope, receive, told)
