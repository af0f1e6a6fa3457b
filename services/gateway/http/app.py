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
from services.gateway.http.middleware.headers import AnswerHeaders, Check, cross_origin, host_check, key_check
from services.gateway.http.middleware.receiving import ReceivingMiddleware
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
        Middleware(Check, check=host_check(gate.settings.gateway, gate.settings.access)),
        *cross_origin(gate.settings.access),  # before keys are asked for: a preflight carries none
        Middleware(ReceivingMiddleware, intake=intake, access=gate.access),
        Middleware(Check, check=key_check(gate.access)),
        Middleware(AnswerHeaders, reports=load_reports),
    ]
    return Starlette(routes=routes, middleware=around, exception_handlers=handlers)
