"""GET /deployment, POST /deployment/restart and /deployment/scale: any key may look, an operator's may order."""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.answers.objects import json_response
from services.gateway.http.deployment.supervisor import ABSENT, SupervisorLink
from services.gateway.http.deployment.view import DeploymentView, GatewayView, counts, services, workers
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.reading import field_error
from shared.errors import RequestError
from shared.messages import Load
from shared.processes.supervision import FEWEST, SupervisorOrder
from shared.version import VERSION

LOAD_TIMEOUT = 0.5  # seconds
MAX_REPLICAS = 64  # that are started by an order over HTTP
ACCEPTED = 202
NO_STORE = {"cache-control": "no-store"}


class RestartBody(msgspec.Struct, kw_only=True):
    """What `pageant restart` asks for: the processes of these services are replaced in turn, while streams go on."""

    services: list[str]


class ScaleBody(msgspec.Struct, kw_only=True):
    """What `pageant scale` asks for."""

    replicas: dict[str, int]  # by service


class OrderAnswer(msgspec.Struct, kw_only=True):
    """The order is in the supervisor's queue; GET /deployment shows how it goes on."""

    accepted: str


class DeploymentEndpoints:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._supervisor = SupervisorLink(gate.settings.deployment.runtime_path)

    async def view(self, request: Request) -> Response:
        service = self._gate.service
        load, supervision = await asyncio.gather(self._load(), self._supervisor.report())
        deployment = service.deployment
        view = DeploymentView(
            time=time.monotonic(),
            model=self._gate.settings.engine.model_name,
            version=VERSION,
            reason=service.readiness.unwell,
            services=services(deployment.roster, scheduler_is_live=deployment.scheduler_is_live),
            workers=[] if load is None else workers(load),
            gateway=GatewayView(open_streams=len(service.journal), paused_streams=len(service.recovery.paused)),
            counts=None if load is None else counts(load),
            supervisor=supervision,
            refusal=self._refusal(request) or ("" if supervision else ABSENT),
        )
        return json_response(view, headers=NO_STORE)

    async def restart(self, request: Request) -> Response:
        self._gate.check_operator(request)
        body = await self._gate.bodies.read(request, RestartBody)
        if not body.services:
            raise field_error("services", f"must not be empty: name at least one of {', '.join(FEWEST)}")
        return await self._give(SupervisorOrder(restart=list(dict.fromkeys(body.services)), wait=False))

    async def scale(self, request: Request) -> Response:
        self._gate.check_operator(request)
        body = await self._gate.bodies.read(request, ScaleBody)
        if not body.replicas:
            raise field_error("replicas", f"must not be empty: give a count for at least one of {', '.join(FEWEST)}")
        for service, count in body.replicas.items():
            if count > MAX_REPLICAS:
                text = f"replicas: {service[:32]}={count} is more than {MAX_REPLICAS}; `pageant scale` has no limit"
                raise RequestError(text, field="replicas")
        return await self._give(SupervisorOrder(scale=body.replicas, wait=False))

    async def _give(self, order: SupervisorOrder) -> Response:
        await self._supervisor.give(order)
        return json_response(OrderAnswer(accepted=str(order)), ACCEPTED, NO_STORE)

    async def _load(self) -> Load | None:
        try:
            return await self._gate.service.questions.load(LOAD_TIMEOUT)
        except RequestError:  # then the gateway tells what it knows alone
            return None

    def _refusal(self, request: Request) -> str:
        try:
            self._gate.check_operator(request)
        except RequestError as error:
            return str(error)
        return ""
