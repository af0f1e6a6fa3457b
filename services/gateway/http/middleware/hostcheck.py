"""Ends requests that name another server: a web page whose own name was made to lead here (DNS rebinding).

A browser lets such a page read every answer, since to it they are of the page's own origin; the name gives it away.
Starlette's TrustedHostMiddleware does not tell a client which setting to change, nor know all names of loopback.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.errors.failures import refusal
from shared.config import AccessSettings, GatewaySettings
from shared.errors import RejectCode, RequestError
from shared.exposure import ANY, answers_to, is_loopback, read_hosts


class HostCheck:
    """Refuses every path, with 403, under a name that is neither loopback's nor one of `allowed`."""

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and ANY not in self._allowed:
            given = Headers(scope=scope).getlist("host")
            if len(given) != 1 or not answers_to(given[0], self._allowed):
                await refusal(_not_ours(", ".join(given)), scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def allowed_hosts(gateway: GatewaySettings, access: AccessSettings) -> tuple[str, ...]:
    """What is allowed besides loopback: where nothing is said, nothing to a server on loopback alone, else any."""
    if access.allowed_hosts:
        return read_hosts(access.allowed_hosts)
    return () if is_loopback(gateway.host) else (ANY,)


def _not_ours(given: str) -> RequestError:
    return RequestError(
        f"this server does not answer to the host {given[:128]!r}: it answers to localhost and loopback addresses; "
        "the setting allowed_hosts (PAGEANT_ALLOWED_HOSTS) names others",
        code=RejectCode.PERMISSION_DENIED,
        field="host",
    )
