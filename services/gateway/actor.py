"""The gateway's shell: the servers' lives, and its parts in the deployments of the models that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from services.gateway.access.auth import make_access
from services.gateway.access.intake import make_intake
from services.gateway.generation.models import ServedModels
from services.gateway.grpc.load_service import LoadService
from services.gateway.grpc.server import GRACE, FrontServer, Servicers
from services.gateway.grpc.servicer import ControlServicer, InferenceServicer
from services.gateway.http.app import make_app, make_batch_runner
from services.gateway.http.batches.runner import BatchRunner
from services.gateway.http.connection.server import HttpServer
from services.gateway.http.requests.gate import Gate
from services.gateway.http.requests.thinking import FIELD, as_the_prompt_ends, read_budget
from services.gateway.links import ModelLinks
from services.gateway.member import GatewayMember
from shared.actor import LifePhase
from shared.clocks.clock import steady_time
from shared.config import Settings
from shared.requests.reasoning import ThinkingBudget
from shared.transport import Transport

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

JOIN_SECONDS = 5.0  # of a gateway's life, in which it is not ready before it is so for every model


class GatewayActor(GatewayMember):
    """Owns the process's life; a member of the first model's deployment, with links to those of others."""

    def __init__(self, transport: Transport, settings: Settings, instance: str | None = None) -> None:
        super().__init__(transport, settings, instance)
        self.access = make_access(settings.access)
        self.intake = make_intake(settings.gateway)
        self.models = ServedModels(self.generation)
        self.links = ModelLinks(settings, self.instance, self.models)
        self.gate = Gate(self.generation, self.access, settings, self.models)
        self.server = self._grpc_server()
        self.http: HttpServer | None = None
        self.batches: BatchRunner | None = None
        if settings.gateway.http_port >= 0:
            app = make_app(self.gate, self.intake, self.collectors)
            self.http = HttpServer(app, settings.gateway, settings.access)
            self.batches = make_batch_runner(self.gate)

    def _grpc_server(self) -> FrontServer:
        servicers = Servicers(
            InferenceServicer(self.models, self.access, self._thinking_budget),
            ControlServicer(self.models, self.access, self.request_drain),
            LoadService(self.generation.load_reports, self.readiness),
        )
        settings = self.settings
        return FrontServer(servicers, self.access, self.intake, self.models, settings.gateway, settings.access)

    async def _thinking_budget(self, model: str, given: int, is_chat: bool) -> ThinkingBudget | None:
        """For gRPC, which knows no formats of reasoning."""
        formats = self.gate.choose(model).formats
        await formats.learn()
        budget = read_budget(formats, given, FIELD)
        return budget if is_chat else as_the_prompt_ends(budget)

    # -- life

    async def on_start(self) -> None:
        await self.server.start()
        if self.http is not None:
            await self.http.start()
        await super().on_start()
        self._follow_models()
        self.spawn(self.server.follow_health())
        self.spawn(self.server.watch_peers())
        if self.batches is not None:
            self.spawn(self.batches.run())

    def on_tick(self) -> None:
        super().on_tick()
        self._follow_models()

    def _follow_models(self) -> None:
        if self.phase < LifePhase.DRAINING:
            self.links.look(lambda member: self.spawn(self.links.run(member)))

    def on_drain(self, deadline: float) -> None:
        self.readiness.notice()
        if self.batches is not None:
            self.batches.leave()
        if not self.settings.gateway.share_port:  # else the calls that have come go on
            self.links.drain(deadline)
        self.spawn(self._leave())

    async def _leave(self) -> None:
        seconds = self.leaves_by - steady_time()
        await self.wait_to_leave(self._hand_over(seconds) if self.settings.gateway.share_port else self._until_idle())
        await self.links.close()
        self.leave("the server is shutting down")

    async def _until_idle(self) -> None:
        """Return once no stream of any model is open."""
        await self.until_idle()
        await self.links.until_idle()

    async def _hand_over(self, seconds: float) -> None:
        """Leave the ports to others at once; return when every call that had come has ended."""
        if self.http is not None:
            self.http.hand_over(seconds)
        await self.server.hand_over(seconds + GRACE)
        await self._until_idle()

    async def on_stop(self) -> None:
        if self.http is not None:
            await self.http.stop()
        await self.server.stop()
        await super().on_stop()

    # -- what others ask for

    @property
    def status(self) -> str:
        if self.phase is not LifePhase.READY:
            return self.phase.name
        is_new = steady_time() - self.started < JOIN_SECONDS
        if is_new and any(member.phase is LifePhase.STARTING for member in self.links.members.values()):
            return LifePhase.STARTING.name
        return "NOT_SERVING" if self.readiness.unwell else self.phase.name

    def snapshot(self) -> Mapping[str, Any]:
        return {
            **super().snapshot(),
            "unwell": self.readiness.unwell,
            "num_streams": sum(len(service.journal) for service in self.models),
            "num_paused": len(self.generation.recovery.paused),
            "num_calls": len(self.generation.calls),
            "num_open_tokens": self.generation.admission.num_tokens,
            "num_waiting": len(self.generation.forecasts),
            "members": self.roster.members,
        }

    def collectors(self) -> list[Collector]:
        for service in self.models:
            service.meter.num_open = len(service.journal)
        batches = [] if self.batches is None else [self.batches.meter]
        return [*super().collectors(), *(service.meter for service in self.models), *batches]
