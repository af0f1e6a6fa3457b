"""An actor that lives on the scheduler's roster: all services but the scheduler itself."""

from __future__ import annotations

import time

import structlog

from shared.actor.actor import Actor, Phase
from shared.config import Settings
from shared.errors import FatalError, ProtocolError
from shared.messages import (
    DraftCapacity,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Refused,
    Roster,
    ServiceName,
    Tick,
    WorkerCapacity,
    schema_hash,
)
from shared.transport.link import Transport

log = structlog.get_logger()

CLOCK_SKEW = 3600.0  # seconds between the clocks of two hosts, at most


class MemberActor(Actor):
    """Says hello, sends heartbeats, and keeps the last roster.

    Heartbeats come from the same loop that handles messages, so a stuck actor falls silent.  When the scheduler is a
    new life (or has forgotten us), hello is said again.
    """

    def __init__(self, transport: Transport, settings: Settings, instance: str | None = None) -> None:
        super().__init__(transport, settings, instance)
        self.roster = Roster(scheduler_epoch=0, version=0, members=[])
        self._roster_seen = 0.0

    # -- for subclasses

    def capacity(self) -> WorkerCapacity | None:
        """What a worker offers; None for the others."""
        return None

    def draft_capacity(self) -> DraftCapacity | None:
        """What a draft offers; None for the others, and for one that is off."""
        return None

    def on_roster(self, joined: list[Member], left: list[Member]) -> None:
        """The membership has changed; `self.roster` is already the new one."""

    def on_new_scheduler(self) -> None:
        """The scheduler is another life than before: whatever it knew of us is gone."""

    def on_forgotten(self) -> None:
        """The scheduler that we were with took us for lost: what it had from us it has given up."""

    def on_moved(self) -> None:
        """Others reach us at another address than before: `self.inbox.address` is already the new one."""

    def on_tick(self) -> None:
        """Every heartbeat interval."""

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way that has not taken longer than it may; of those who compute."""
        return False

    @property
    def known_members(self) -> list[Member]:
        return self.roster.members

    # -- for handlers

    @property
    def scheduler(self) -> str:
        return self.transport.scheduler_address

    def members(self, service: ServiceName) -> list[Member]:
        """The live instances of a service, in the roster's order."""
        return [member for member in self.roster.members if member.service == service]

    @property
    def scheduler_is_live(self) -> bool:
        """Whether a roster came within the heartbeat timeout."""
        return time.monotonic() - self._roster_seen < self.settings.heartbeat_timeout

    # -- the protocol

    async def on_start(self) -> None:
        self.say_hello()
        self.every(self.settings.heartbeat_interval, Tick())

    def say_hello(self) -> None:
        offers = (self.capacity(), self.draft_capacity())
        self.send(
            self.scheduler,
            Hello(self.service, self.instance, self.inbox.address, self.epoch, schema_hash(), *offers),
        )

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            self.service,
            self.instance,
            self.epoch,
            self.progress,
            self.inbox.address,
            self.stalled,
            self.is_computing,
        )

    def handle_tick(self, _: Tick) -> None:
        self.say_status()
        if self.phase < Phase.DRAINING:
            if self.inbox.readdress():
                self._move()
            if self.phase is Phase.READY:
                self.send(self.scheduler, self.heartbeat())
            else:
                self.say_hello()
        self.on_tick()

    def _move(self) -> None:
        """Leave as who we were, and come as another life: what was sent to the old address is lost."""
        log.info("moved", address=self.inbox.address)
        self.send(self.scheduler, Goodbye(self.service, self.instance, self.epoch))
        self.epoch = time.time_ns() // 1000
        self.on_moved()
        if self.phase is Phase.READY:
            self.say_hello()
            self.on_forgotten()

    def handle_roster(self, roster: Roster) -> None:
        check_epoch(roster.scheduler_epoch)
        self._roster_seen = time.monotonic()
        old = self.roster
        if (roster.scheduler_epoch, roster.version) < (old.scheduler_epoch, old.version):
            return
        if (roster.scheduler_epoch, roster.version) == (old.scheduler_epoch, old.version) and old.version:
            return
        self.roster = roster
        if old.scheduler_epoch and old.scheduler_epoch != roster.scheduler_epoch:
            self.on_new_scheduler()
        known = any(member.instance == self.instance for member in roster.members)
        if not known and self.phase < Phase.DRAINING:
            self.say_hello()
            if self.phase is Phase.READY and old.scheduler_epoch == roster.scheduler_epoch:
                self.on_forgotten()
        elif known and self.phase is Phase.STARTING:
            self.phase = Phase.READY
            log.info("ready", address=self.inbox.address)
        joined = [member for member in roster.members if member not in old.members]
        left = [member for member in old.members if member not in roster.members]
        for member in left:
            self.outbox.forget(member.address)
        if joined or left:
            self.on_roster(joined, left)

    def handle_refused(self, message: Refused) -> None:
        if message.instance == self.instance:
            raise FatalError(f"refused by the scheduler: {message.reason}")

    async def on_stop(self) -> None:
        self.send(self.scheduler, Goodbye(self.service, self.instance, self.epoch))
        self.outbox.flush()


def check_epoch(epoch: int) -> None:
    """Epochs are times in microseconds, so one of the future is nobody's.  It would lock out every real one after it.

    Raises ProtocolError.
    """
    if not 0 <= epoch <= (time.time() + CLOCK_SKEW) * 1e6:
        raise ProtocolError(f"epoch {epoch} is not a time that has been")
