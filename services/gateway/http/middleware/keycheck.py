"""Shows every request's headers to the gate before its body is read: no route can be forgotten."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.access.auth import Access
from services.gateway.http.errors.failures import refusal
from shared.errors import RequestError

# Whether it serves, what it is, and the page that asks for everything else, a gateway tells everybody.
OPEN = frozenset({"/", "/health", "/version"})


class KeyMiddleware:
    """Ends requests without a key that opens with 401."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            request = Request(scope)
            try:
                self._access.caller(request.headers.items())
            except RequestError as error:
                await refusal(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)
