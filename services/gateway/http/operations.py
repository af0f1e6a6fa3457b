"""/v1/models, /health, /version, /metrics: about the server, not about a generation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation.service import GenerationService
from services.gateway.http.answers.objects import json_response
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


class Health(msgspec.Struct):
    status: str
    reason: str


class ServerVersion(msgspec.Struct):
    version: str


class ServerLoad(msgspec.Struct):
    server_load: int


class Operations:
    """The endpoints."""

    def __init__(self, gate: Gate, collectors: Callable[[], list[Collector]]) -> None:
        self._gate = gate
        self._collectors = collectors
        self._started = int(time.time())

    async def models(self, request: Request) -> Response:
        listed = []
        for service in self._gate.models:
            listed += [self._model(service, name) for name in service.names]
            listed += [self._adapter(service, name, path) for name, path in service.adapters.listed().items()]
        return json_response(Models(data=listed))

    async def model(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        service = self._gate.choose(name).service
        adapter = service.adapters.of(name)
        if adapter is not None:
            return json_response(self._adapter(service, name, adapter.path))
        return json_response(self._model(service, service.names[0]))

    async def load(self, request: Request) -> Response:
        """vLLM's: how many generations this gateway has under way."""
        return json_response(ServerLoad(sum(len(service.journal) for service in self._gate.models)))

    async def tokenizer_info(self, request: Request) -> Response:
        """vLLM's: the tokenizer's configuration, with the chat template that is used."""
        gate = self._gate.choose(request.query_params.get("model"))
        return json_response(msgspec.json.decode((await gate.service.questions.describe()).config))

    async def health(self, request: Request) -> Response:
        """200 where requests are served now; 503 with what is missing.  Of the model that the query names, else of the
        first."""
        try:
            unwell = self._gate.choose(request.query_params.get("model")).service.readiness.unwell
        except RequestError as error:  # whose text lists the models, and this path needs no key
            raise RequestError("there is no such model", field="model", code=error.code) from None
        return json_response(Health("unavailable" if unwell else "ok", unwell), 503 if unwell else 200)

    async def version(self, request: Request) -> Response:
        return json_response(ServerVersion(VERSION))

    async def metrics(self, request: Request) -> Response:
        engines = await asyncio.gather(*(_engine(service) for service in self._gate.models))
        return Response(exposition(*engines, *self._collectors()), media_type=CONTENT_TYPE_LATEST)

    def _model(self, service: GenerationService, name: str) -> ListedModel:
        return ListedModel(
            id=name,
            created=self._started,
            root=service.names[0],
            max_model_len=service.deployment.roster.max_model_len or None,
            system_fingerprint=service.deployment.system_fingerprint or None,
        )

    def _adapter(self, service: GenerationService, name: str, path: str) -> ListedModel:
        base = self._model(service, service.names[0])
        return msgspec.structs.replace(base, id=name, root=path, parent=base.id)


async def _engine(service: GenerationService) -> EngineCollector:
    """What the scheduler of a model counts; where it does not answer, the gateway tells of itself alone."""
    load: Load | None = None
    with contextlib.suppress(RequestError):
        load = await service.questions.load(LOAD_TIMEOUT)
    max_model_len = service.deployment.roster.max_model_len
    return EngineCollector(service.names[0], load, service.settings.memory.cache_labels, max_model_len)
