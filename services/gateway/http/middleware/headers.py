"""What is checked of a request's headers before its body is read, and which headers answers get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access.auth import Access
from services.gateway.access.header import SPAN_DIGITS, read_metadata
from services.gateway.health.load_report import ANSWER, ASKED, LoadReports
from services.gateway.http.errors.failures import refusal
from shared.config import AccessSettings, GatewaySettings
from shared.errors import RejectCode, RequestError
from shared.exposure import ANY, answers_to, is_loopback, read_hosts, read_origins

OPEN = frozenset({"/", "/health", "/version", "/openapi.json"})  # paths that need no key
PAGE_PARTS = "/page/"  # the beginning of more: what the page consists of, the same for all
# Paths whose answers report load.
REPORTED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
TRACEPARENT = "traceparent"
REQUEST_ID = "x-request-id"
OWN_ID = "x-pageant-request-id"
MAX_ECHOED_CHARS = 256

# What a page of another origin may read of an answer beside its body: other headers are hidden from it.
EXPOSED = (REQUEST_ID, OWN_ID, "retry-after", "retry-after-ms", "www-authenticate")


class Check:
    """Ends a request with the RequestError that `check` raises, whatever its path: no route can be forgotten."""

    def __init__(self, app: ASGIApp, check: Callable[[Request], None]) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Request(scope))
            except RequestError as error:
                await refusal(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def host_check(gateway: GatewaySettings, access: AccessSettings) -> Callable[[Request], None]:
    """Refuses requests under a name that is neither loopback's nor allowed: a web page whose own name was made to lead
    here (DNS rebinding).  A browser lets such a page read every answer, since to it they are of the page's own origin.

    Starlette's TrustedHostMiddleware does not say which setting to change, nor know all names of loopback.
    """
    allowed = allowed_hosts(gateway, access)

    def check(request: Request) -> None:
        given = request.headers.getlist("host")
        if ANY not in allowed and (len(given) != 1 or not answers_to(given[0], allowed)):
            raise RequestError(
                f"this server does not answer to the host {', '.join(given)[:128]!r}: it answers to localhost and "
                "loopback addresses; the setting allowed_hosts (PAGEANT_ALLOWED_HOSTS) names others",
                code=RejectCode.PERMISSION_DENIED,
                field="host",
            )

    return check


def allowed_hosts(gateway: GatewaySettings, access: AccessSettings) -> tuple[str, ...]:
    """The hosts allowed besides loopback.  By default any, or none where the server listens on loopback only."""
    if access.allowed_hosts:
        return read_hosts(access.allowed_hosts)
    return () if is_loopback(gateway.host) else (ANY,)


def key_check(access: Access) -> Callable[[Request], None]:
    """Refuses requests without a valid key."""

    def check(request: Request) -> None:
        path: str = request.scope["path"]
        if path not in OPEN and not path.startswith(PAGE_PARTS):
            access.caller(request.headers.items())

    return check


def cross_origin(settings: AccessSettings) -> list[Middleware]:
    """Lets web pages of other origins ask here and read the answers (the setting `cors_allow_origins`).

    Empty where no origin is allowed: then browsers let no page of another origin read or post anything.  Cookies are
    never allowed: a caller is known by its key.
    """
    origins = read_origins(settings.cors_allow_origins)
    methods = ("GET", "POST", "DELETE")
    options: dict[str, Any] = {"allow_methods": methods, "allow_headers": ("*",), "expose_headers": EXPOSED}
    return [Middleware(CORSMiddleware, allow_origins=origins, **options)] if origins else []


class AnswerHeaders:
    """Adds the model's load to answers where the request asks for it, and the caller's trace where it sent one."""

    def __init__(self, app: ASGIApp, first: LoadReports) -> None:
        """`first`: the first model's, for requests that were refused before it was known which one they name."""
        self._app = app
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                request, headers = Request(scope), MutableHeaders(scope=message)
                await self._add_load(request, headers)
                _add_trace(request, headers)
                _echo_id(request, headers)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)

    async def _add_load(self, request: Request, headers: MutableHeaders) -> None:
        wanted = request.headers.get(ASKED, "")
        if wanted and request.scope["path"] in REPORTED:
            reports: LoadReports = getattr(request.state, "load_reports", self._first)
            await reports.refresh()
            if report := reports.header(wanted):
                headers[ANSWER] = report


def _echo_id(request: Request, headers: MutableHeaders) -> None:
    """The client's own id comes back to it, and beside it the server's, which is in every log line."""
    if own := headers.get(REQUEST_ID):
        headers[OWN_ID] = own
    given = request.headers.get(REQUEST_ID, "")
    if given and len(given) <= MAX_ECHOED_CHARS:
        headers[REQUEST_ID] = given


def _add_trace(request: Request, headers: MutableHeaders) -> None:
    """The caller's trace, with a span of ours: its id is the beginning of the request's, as in logs and exports."""
    call = read_metadata([(TRACEPARENT, request.headers.get(TRACEPARENT, ""))])
    if call.parent_span_id and (request_id := headers.get(REQUEST_ID)):
        headers[TRACEPARENT] = f"00-{call.trace_id}-{request_id[:SPAN_DIGITS]}-01"
