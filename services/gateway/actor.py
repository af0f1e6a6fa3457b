"""The gateway's shell: its mailbox, the roster's consequences for open streams, and the servers' lives."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from services.gateway.access.auth import make_access
from services.gateway.access.intake import make_intake
from services.gateway.bus.deployment import RosterView
from services.gateway.generation.service import GenerationService
from services.gateway.grpc.load_service import LoadService
from services.gateway.grpc.server import GRACE, FrontServer, Servicers
from services.gateway.grpc.servicer import ControlServicer, InferenceServicer
from services.gateway.health.load_report import LoadReports
from services.gateway.health.readiness import Readiness
from services.gateway.http.app import make_app
from services.gateway.http.connection.server import HttpServer
from services.gateway.http.requests.gate import Gate
from shared.actor import LifePhase, MemberActor
from shared.actor.actor import Handlers
from shared.clock import steady_time
from shared.config import Settings
from shared.errors import FatalError
from shared.messages import (
    DecodeResult,
    EncodeResult,
    Fingerprint,
    GatewayInbox,
    Load,
    Member,
    Message,
    PiecesResult,
    Refused,
    RequestRejected,
    Roster,
    ServiceName,
    TextBatch,
    Tick,
)
from shared.transport import Transport

if TYPE_CHECKING:
    from prometheus_client.registry import Collector


class GatewayActor(MemberActor):
    """Owns the process's life and its mailbox; what comes for open streams goes to the generation service."""

    service = ServiceName.GATEWAY
    inbox_union = GatewayInbox

    def __init__(self, transport: Transport, settings: Settings, instance: str | None = None) -> None:
        super().__init__(transport, settings, instance)
        self.access = make_access(settings.access)
        self.intake = make_intake(settings.gateway)
        self.deployment = RosterView(self)
        seconds, shares_ports = settings.deployment.resume_timeout, settings.gateway.share_port
        self.readiness = Readiness(self, self.deployment, seconds, shares_ports=shares_ports)
        self.generation = GenerationService(self, self.deployment, self.readiness, settings)
        self.load_reports = LoadReports(self.generation.questions.ask_load)
        self.server = self._grpc_server()
        self.http = self._http_server() if settings.gateway.http_port >= 0 else None
        self._kinds: dict[str, Fingerprint] = {}  # by name: of the workers, and of those that began open streams
        self._flush_due = False
        self._departure: asyncio.Timeout | None = None  # while it leaves

    def _grpc_server(self) -> FrontServer:
        servicers = Servicers(
            InferenceServicer(self.generation, self.access, self.load_reports, self.settings.engine.model_name),
            ControlServicer(self.generation, self.access, self.request_drain),
            LoadService(self.load_reports, self.readiness),
        )
        settings = self.settings
        return FrontServer(servicers, self.access, self.intake, self.readiness, settings.gateway, settings.access)

    def _http_server(self) -> HttpServer:
        gate = Gate(self.generation, self.access, self.settings)
        app = make_app(gate, self.intake, self.load_reports, self.collectors)
        return HttpServer(app, self.settings.gateway, self.settings.access)

    def handlers(self) -> Handlers:
        return {
            TextBatch: self.generation.handle_text,
            RequestRejected: self.generation.handle_rejected,
            EncodeResult: self.generation.handle_answer,
            DecodeResult: self.generation.handle_answer,
            PiecesResult: self.generation.handle_answer,
            Load: self.generation.handle_answer,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    # -- life

    async def on_start(self) -> None:
        await self.server.start()
        if self.http is not None:
            await self.http.start()
        await super().on_start()
        self.spawn(self.server.follow_health())
        self.spawn(self.server.watch_peers())

    def on_drain(self, deadline: float) -> None:
        self.readiness.notice()
        self.spawn(self._leave())

    def on_hurry(self) -> None:
        if self._departure is not None and not self._departure.expired():
            self._departure.reschedule(asyncio.get_running_loop().time() + self.leaves_by - steady_time())

    async def _leave(self) -> None:
        """Let the open streams go on for as long as there is, then end them and stop."""
        seconds = self.leaves_by - steady_time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds) as self._departure:
                await (self._hand_over(seconds) if self.settings.gateway.share_port else self._until_idle())
        self._departure = None
        self.generation.recovery.fail_all("the server is shutting down")
        self.stop()
        self.post(Tick())  # wakes the run loop, which sees that it is over

    async def _until_idle(self) -> None:
        while len(self.generation.journal):
            await self.readiness.changed()

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
        return "NOT_SERVING" if self.phase is LifePhase.READY and self.readiness.unwell else self.phase.name

    def snapshot(self) -> Mapping[str, Any]:
        return {
            **super().snapshot(),
            "unwell": self.readiness.unwell,
            "num_streams": len(self.generation.journal),
            "num_paused": len(self.generation.recovery.paused),
            "num_calls": len(self.generation.calls),
            "num_open_tokens": self.generation.admission.num_tokens,
            "num_waiting": len(self.generation.forecasts),
            "members": self.roster.members,
        }

    def collectors(self) -> list[Collector]:
        self.generation.meter.num_open = len(self.generation.journal)
        return [*super().collectors(), self.generation.meter]

    def alive(self) -> list[Fingerprint]:
        begun = sorted({stream.fingerprint for stream in self.generation.journal if not stream.ended})
        return [self._kinds[name] for name in begun if name in self._kinds]

    @property
    def address(self) -> str:
        return self.inbox.address

    def flush(self) -> None:
        """Send what is queued now."""
        self.outbox.flush()

    def send_soon(self, address: str, message: Message) -> None:
        """Send from outside a handler: one flush for all that this turn of the event loop queues."""
        self.send(address, message)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush_due = False
        if self.phase is not LifePhase.STOPPED:
            self.outbox.flush()

    # -- the mailbox

    def before_flush(self) -> None:
        self.generation.throttle.release()

    # -- the roster's consequences

    def handle_roster(self, roster: Roster) -> None:
        begun = {one.name: one for one in self.alive()}
        super().handle_roster(roster)
        self._kinds = {one.name: one for one in self.roster.fingerprints} | begun
        self.readiness.heard(roster, is_current=roster.scheduler_epoch == self.roster.scheduler_epoch)
        self.generation.recovery.resume()
        self.readiness.notice()

    def on_roster(self, joined: list[Member], left: list[Member]) -> None:
        gone = {member.address for member in left if member.service is ServiceName.TOKENIZER}
        if gone:
            self.generation.recovery.replace_tokenizers(gone)

    def on_new_scheduler(self) -> None:
        self.generation.recovery.pause_all()

    def on_forgotten(self) -> None:
        self.generation.recovery.pause_all()  # the scheduler has ended what it had from us

    def on_moved(self) -> None:
        for stream in self.generation.journal:
            stream.readdress(self.address)

    def on_tick(self) -> None:
        if self.phase is LifePhase.DRAINING:  # still alive: its streams go on
            self.send(self.scheduler, self.heartbeat())
        now = time.monotonic()
        self.generation.recovery.check_overdue(now)
        if self.readiness.has_lost_scheduler(now):
            self.generation.recovery.fail_all("the scheduler was lost")
            if self.inbox.is_cut_off:  # nothing is left to lose here, and another life may find a network
                raise FatalError("no network leads to the scheduler")
        self.readiness.notice()
