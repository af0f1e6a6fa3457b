"""The routes: which endpoint answers which path, and what happens to what goes wrong in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from services.gateway.access.intake import BodyIntake
from services.gateway.health.load_report import LoadReports
from services.gateway.http.chat.endpoint import Chats
from services.gateway.http.completions.endpoint import Completions
from services.gateway.http.embeddings import Embeddings
from services.gateway.http.errors.failures import defect, failure, no_such_route
from services.gateway.http.middleware.cross_origin import cross_origin
from services.gateway.http.middleware.hostcheck import HostCheck, allowed_hosts
from services.gateway.http.middleware.keycheck import KeyMiddleware
from services.gateway.http.middleware.load_header import LoadHeader
from services.gateway.http.middleware.receiving import ReceivingMiddleware
from services.gateway.http.middleware.tracing import TraceHeader
from services.gateway.http.operations import Operations
from services.gateway.http.page import page
from services.gateway.http.requests.gate import Gate
from services.gateway.http.responses.endpoint import Responses
from services.gateway.http.tokens import Tokens
from shared.errors import RequestError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector


def make_app(
    gate: Gate, intake: BodyIntake, load_reports: LoadReports, collectors: Callable[[], list[Collector]]
) -> Starlette:
    """The ASGI application of one gateway.  `collectors`: what /metrics tells of this process."""
    operations, tokens = Operations(gate, collectors), Tokens(gate)
    routes = [
        Route("/v1/completions", Completions(gate).post, methods=["POST"]),
        Route("/v1/chat/completions", Chats(gate).post, methods=["POST"]),
        Route("/v1/responses", Responses(gate).post, methods=["POST"]),
        Route("/v1/embeddings", Embeddings(gate).post, methods=["POST"]),
        Route("/v1/models", operations.models, methods=["GET"]),
        Route("/v1/models/{name:path}", operations.model, methods=["GET"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", operations.health, methods=["GET"]),
        Route("/version", operations.version, methods=["GET"]),
        Route("/metrics", operations.metrics, methods=["GET"]),
        Route("/", page, methods=["GET"]),
    ]
    handlers = {RequestError: failure, HTTPException: no_such_route, Exception: defect}
    around = [
        Middleware(HostCheck, allowed=allowed_hosts(gate.settings.gateway, gate.settings.access)),
        *cross_origin(gate.settings.access),  # before keys are asked for: a preflight carries none
        Middleware(ReceivingMiddleware, intake=intake, access=gate.access),
        Middleware(KeyMiddleware, access=gate.access),
        Middleware(LoadHeader, reports=load_reports),
        Middleware(TraceHeader),
    ]
    return Starlette(routes=routes, middleware=around, exception_handlers=handlers)
