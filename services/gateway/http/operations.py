"""/v1/models, /health, /version, /metrics: about the server, not about a generation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.answers.objects import encode
from services.gateway.http.requests.gate import Gate
from shared.errors import RequestError
from shared.exposition import EngineCollector, exposition
from shared.messages import Load
from shared.version import VERSION

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

LOAD_TIMEOUT = 1.0  # seconds


class ListedModel(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "pageant"
    root: str
    parent: str | None = None
    max_model_len: int | None
    system_fingerprint: str | None = None


class Models(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ListedModel]


class Operations:
    """The endpoints."""

    def __init__(self, gate: Gate, collectors: Callable[[], list[Collector]]) -> None:
        self._gate = gate
        self._collectors = collectors
        self._started = int(time.time())

    async def models(self, request: Request) -> Response:
        return _json(Models(data=[self._model()]))

    async def model(self, request: Request) -> Response:
        self._gate.check_model(request.path_params["name"])
        return _json(self._model())

    async def health(self, request: Request) -> Response:
        """200 where requests are served now; 503 with what is missing."""
        unwell = self._gate.service.readiness.unwell
        return _json({"status": "unavailable" if unwell else "ok", "reason": unwell}, 503 if unwell else 200)

    async def version(self, request: Request) -> Response:
        return _json({"version": VERSION})

    async def metrics(self, request: Request) -> Response:
        load: Load | None = None
        with contextlib.suppress(RequestError):  # then the gateway tells of itself alone
            answer: Any = await self._gate.service.questions.ask_load(LOAD_TIMEOUT)
            load = answer
        text = exposition(EngineCollector(self._gate.settings.engine.model_name, load), *self._collectors())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _model(self) -> ListedModel:
        settings = self._gate.settings
        limit = self._gate.max_model_len or None
        return ListedModel(
            id=settings.engine.model_name,
            created=self._started,
            root=settings.engine.model_name,
            max_model_len=limit,
            system_fingerprint=self._gate.service.deployment.system_fingerprint or None,
        )


def _json(body: msgspec.Struct | dict[str, str], status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")
