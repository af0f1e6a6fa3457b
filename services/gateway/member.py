"""A gateway's part in one model's deployment: its mailbox there, and what the roster means for open streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable

from services.gateway.bus.deployment import RosterView
from services.gateway.generation.service import GenerationService
from services.gateway.health.readiness import Readiness
from shared.actor import LifePhase, MemberActor
from shared.actor.actor import Handlers
from shared.clocks.clock import steady_time
from shared.config import Settings
from shared.errors import FatalError
from shared.messages import (
    Adapter,
    AdapterLoaded,
    DecodeResult,
    DescribeResult,
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

ANSWERS = (EncodeResult, DecodeResult, PiecesResult, DescribeResult, Load, AdapterLoaded)  # to questions


class GatewayMember(MemberActor):
    """Owns the mailbox; what comes for open streams goes to the generation service."""

    service = ServiceName.GATEWAY
    inbox_union = GatewayInbox

    def __init__(self, transport: Transport, settings: Settings, instance: str | None = None) -> None:
        super().__init__(transport, settings, instance)
        self.deployment = RosterView(self)
        seconds, shares_ports = settings.deployment.resume_timeout, settings.gateway.share_port
        self.readiness = Readiness(self, self.deployment, seconds, shares_ports=shares_ports)
        self.generation = GenerationService(self, self.deployment, self.readiness, settings)
        self._kinds: dict[str, Fingerprint] = {}  # by name: of the workers, and of those that began open streams
        self._flush_due = False
        self._departure: asyncio.Timeout | None = None  # while it leaves

    def on_hurry(self) -> None:
        if self._departure is not None and not self._departure.expired():
            self._departure.reschedule(asyncio.get_running_loop().time() + self.leaves_by - steady_time())

    def handlers(self) -> Handlers:
        return {
            TextBatch: self.generation.handle_text,
            RequestRejected: self.generation.handle_rejected,
            **dict.fromkeys(ANSWERS, self.generation.handle_answer),
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    async def until_idle(self) -> None:
        """Return once no stream is open."""
        while len(self.generation.journal):
            await self.readiness.changed()

    def alive(self) -> list[Fingerprint]:
        begun = sorted({stream.fingerprint for stream in self.generation.journal if not stream.ended})
        return [self._kinds[name] for name in begun if name in self._kinds]

    def adapters(self) -> list[Adapter]:
        return list(self.generation.adapters.known.values())

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
        is_known = any(member.instance == self.instance for member in self.roster.members)
        self.generation.adapters.heard(self.roster, is_known=is_known)
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
            self.on_lost_scheduler()
        self.readiness.notice()

    async def wait_to_leave(self, idle: Awaitable[None]) -> None:
        """Let the open streams go on until `idle` has come, for as long as there is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self.leaves_by - steady_time())) as self._departure:
                await idle
        self._departure = None

    def leave(self, reason: str) -> None:
        """End the open streams and stop."""
        self.generation.recovery.fail_all(reason)
        self.stop()
        self.post(Tick())  # wakes the run loop, which sees that it is over

    def on_lost_scheduler(self) -> None:
        if self.inbox.is_cut_off:  # nothing is left to lose here, and another life may find a network
            raise FatalError("no network leads to the scheduler")


class ModelMember(GatewayMember):
    """A gateway's part for one of several models, beside the first: another mailbox of the same process.

    It lives until it is drained: the gateway leaves, or the model is removed.
    """

    def on_drain(self, deadline: float) -> None:
        self.readiness.notice()
        self.spawn(self._leave())

    async def _leave(self) -> None:
        await self.wait_to_leave(self.until_idle())
        self.leave("the model was removed, or the server is shutting down")
