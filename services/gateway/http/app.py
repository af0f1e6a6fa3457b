"""The routes: which endpoint answers which path, and what happens to what goes wrong in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from services.gateway.access.intake import BodyIntake
from services.gateway.http.adapters import AdapterEndpoints
from services.gateway.http.batches.call import LineCall
from services.gateway.http.batches.endpoint import Batches
from services.gateway.http.batches.runner import BatchRunner
from services.gateway.http.batches.store import make_batch_store
from services.gateway.http.chat.endpoint import Chats
from services.gateway.http.completions.endpoint import Completions
from services.gateway.http.deployment.endpoint import DeploymentEndpoints
from services.gateway.http.embeddings import Embeddings
from services.gateway.http.errors.failures import defect, failure, no_such_route
from services.gateway.http.files.endpoint import Files
from services.gateway.http.files.store import make_file_store
from services.gateway.http.invocations import Invocations
from services.gateway.http.messages.endpoint import Messages
from services.gateway.http.middleware.headers import AnswerHeaders, Check, cross_origin, host_check, key_check
from services.gateway.http.middleware.prefix import PathPrefix, read_prefix
from services.gateway.http.middleware.receiving import ReceivingMiddleware
from services.gateway.http.openapi import description
from services.gateway.http.operations import Operations
from services.gateway.http.page import page, part
from services.gateway.http.pooling.scoring import Scoring
from services.gateway.http.requests.gate import Gate
from services.gateway.http.responses.endpoint import Responses
from services.gateway.http.tokens import Tokens
from shared.errors import RequestError
from shared.exposition import BatchMeter

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

HANDLERS: dict[Any, Any] = {RequestError: failure, HTTPException: no_such_route, Exception: defect}


def make_app(gate: Gate, intake: BodyIntake, collectors: Callable[[], list[Collector]]) -> Starlette:
    """The ASGI application of one gateway.  `collectors`: what /metrics tells of this process."""
    operations, tokens, adapters = Operations(gate, collectors), Tokens(gate), AdapterEndpoints(gate)
    deployment = DeploymentEndpoints(gate)
    prefix = read_prefix(gate.settings.gateway.root_path)
    routes = [
        *_generations(gate),
        *_stored(gate),
        Route("/v1/models", operations.models, methods=["GET"]),
        Route("/v1/models/{name:path}", operations.model, methods=["GET"]),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", operations.health, methods=["GET"]),
        Route("/version", operations.version, methods=["GET"]),
        Route("/load", operations.load, methods=["GET"]),
        Route("/tokenizer_info", operations.tokenizer_info, methods=["GET"]),
        Route("/ping", operations.health, methods=["GET", "POST"]),
        Route("/metrics", operations.metrics, methods=["GET"]),
        Route("/deployment", deployment.view, methods=["GET"]),
        Route("/deployment/restart", deployment.restart, methods=["POST"]),
        Route("/deployment/scale", deployment.scale, methods=["POST"]),
        Route("/openapi.json", description(prefix), methods=["GET"]),
        Route("/", page, methods=["GET"]),
        Route("/page/{name:path}", part, methods=["GET"]),
    ]
    around = [
        *([Middleware(PathPrefix, prefix=prefix)] if prefix else []),
        Middleware(Check, check=host_check(gate.settings.gateway, gate.settings.access)),
        *cross_origin(gate.settings.access),  # before keys are asked for: a preflight carries none
        Middleware(ReceivingMiddleware, intake=intake, access=gate.access),
        Middleware(Check, check=key_check(gate.access)),
        Middleware(AnswerHeaders, first=gate.service.load_reports),
    ]
    return Starlette(routes=routes, middleware=around, exception_handlers=HANDLERS)


def make_inner_app(gate: Gate) -> Starlette:
    """The same generations without what concerns connections: for requests that the gateway makes itself."""
    return Starlette(routes=_generations(gate), exception_handlers=HANDLERS)


def make_batch_runner(gate: Gate) -> BatchRunner | None:
    """None where no folder for batches is set."""
    store = make_batch_store(make_file_store(gate.settings.gateway))
    if store is None:
        return None
    call, meter = LineCall(make_inner_app(gate)), BatchMeter(gate.settings.engine.model_name)
    return BatchRunner(store, call, gate.settings.gateway, meter)


def _generations(gate: Gate) -> list[Route]:
    responses, messages, scoring = Responses(gate), Messages(gate), Scoring(gate)
    completions, chats, embeddings = Completions(gate), Chats(gate), Embeddings(gate)
    invocations = Invocations(
        gate,
        {
            "/v1/completions": completions.post,
            "/v1/chat/completions": chats.post,
            "/v1/embeddings": embeddings.post,
            "/v1/classify": scoring.classify,
            "/v1/score": scoring.score,
            "/v1/rerank": scoring.rerank,
        },
    )
    return [
        Route("/v1/completions", completions.post, methods=["POST"]),
        Route("/v1/chat/completions", chats.post, methods=["POST"]),
        Route("/v1/responses", responses.post, methods=["POST"]),
        Route("/v1/responses/{response_id}", responses.get, methods=["GET"]),
        Route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/responses/{response_id}/input_items", responses.items, methods=["GET"]),
        Route("/v1/messages", messages.post, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count, methods=["POST"]),
        Route("/v1/embeddings", embeddings.post, methods=["POST"]),
        Route("/pooling", scoring.pool, methods=["POST"]),
        Route("/invocations", invocations.post, methods=["POST"]),
        Route("/classify", scoring.classify, methods=["POST"]),
        Route("/v1/classify", scoring.classify, methods=["POST"]),
        Route("/score", scoring.score, methods=["POST"]),
        Route("/v1/score", scoring.score, methods=["POST"]),
        Route("/rerank", scoring.rerank, methods=["POST"]),
        Route("/v1/rerank", scoring.rerank, methods=["POST"]),
        Route("/v2/rerank", scoring.rerank, methods=["POST"]),
    ]


def _stored(gate: Gate) -> list[Route]:
    """What is kept in `files_dir`."""
    store = make_file_store(gate.settings.gateway)
    batch_store = make_batch_store(store)
    files = Files(gate, store)
    batches = Batches(gate, batch_store)
    return [
        Route("/v1/files", files.create, methods=["POST"]),
        Route("/v1/files", files.list, methods=["GET"]),
        Route("/v1/files/{file_id}", files.retrieve, methods=["GET"]),
        Route("/v1/files/{file_id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", files.content, methods=["GET"]),
        Route("/v1/batches", batches.create, methods=["POST"]),
        Route("/v1/batches", batches.list, methods=["GET"]),
        Route("/v1/batches/{batch_id}", batches.retrieve, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
    ]
