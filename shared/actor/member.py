"""An actor that lives on the scheduler's roster: all services but the scheduler itself."""

from __future__ import annotations

import time

import structlog

from shared.actor.actor import Actor, LifePhase
from shared.clocks.epochs import EpochFollower, is_possible, life_of
from shared.config import Settings
from shared.errors import ConfigError, ProtocolError
from shared.messages import (
    Adapter,
    DraftCapacity,
    Fingerprint,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Refused,
    Roster,
    ServiceName,
    StoreCapacity,
    Tick,
    WorkerCapacity,
    schema_hash,
)
from shared.transport.link import Transport, worth_a_line

log = structlog.get_logger()


class MemberActor(Actor):
    """Sends Hello and heartbeats, and keeps the last roster.

    Heartbeats come from the same loop that handles messages, so a stuck actor falls silent.  When the scheduler is a
    new life (or has forgotten this instance), Hello is sent again.
    """

    def __init__(self, transport: Transport, settings: Settings, instance: str | None = None) -> None:
        super().__init__(transport, settings, instance)
        self.roster = Roster(scheduler_epoch=0, version=0, members=[])
        self._following = EpochFollower(settings.deployment.heartbeat_timeout, time.monotonic)
        self._newest_link = 0  # the greatest number of a link to the scheduler that we follow
        self._num_unbelieved = 0  # rosters

    # -- for subclasses

    def capacity(self) -> WorkerCapacity | None:
        """What a worker offers; None for the others."""
        return None

    def draft_capacity(self) -> DraftCapacity | None:
        """What a draft offers; None for the others, and for one that is off."""
        return None

    def store_capacity(self) -> StoreCapacity | None:
        """What a store offers; None for the others."""
        return None

    def fingerprint(self) -> Fingerprint | None:
        """What a worker computes with, and what those that have the tokenizer make of text; None for the others."""
        return None

    def alive(self) -> list[Fingerprint]:
        """Of a gateway: what began the streams that are open there."""
        return []

    def adapters(self) -> list[Adapter]:
        """Of a gateway: those that requests may name, for a scheduler that begins anew."""
        return []

    def why_otherwise(self) -> str:
        """Why this instance computes otherwise than its settings ask; empty where it does not."""
        return ""

    def on_roster(self, joined: list[Member], left: list[Member]) -> None:
        """The membership has changed; `self.roster` is already the new one."""

    def on_new_scheduler(self) -> None:
        """The scheduler is another life than before: it has lost its state of this instance."""

    def on_forgotten(self) -> None:
        """The same scheduler took this instance for lost: it has given up the work that this instance held."""

    def on_moved(self) -> None:
        """This instance has another address than before: `self.inbox.address` is already the new one."""

    def on_tick(self) -> None:
        """Every heartbeat interval."""

    @property
    def is_computing(self) -> bool:
        """Whether a step is computed that has not taken longer than it may; of services that compute."""
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
        """Whether a roster of the scheduler that we follow came within the heartbeat timeout."""
        return self._following.is_heard

    # -- the protocol

    async def on_start(self) -> None:
        self.say_hello()
        self.every(self.settings.deployment.heartbeat_interval, Tick())

    def say_hello(self) -> None:
        offers = (self.capacity(), self.draft_capacity(), self.fingerprint(), self.alive())
        self.send(
            self.scheduler,
            Hello(
                self.service,
                self.instance,
                self.inbox.address,
                self.epoch,
                schema_hash(),
                *offers,
                newest_epoch=self.newest_epoch,
                adapters=self.adapters(),
                store=self.store_capacity(),
            ),
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
            [fingerprint.name for fingerprint in self.alive()],
            self.newest_epoch,
        )

    @property
    def newest_epoch(self) -> int:
        """The greatest epoch that this instance knows; a scheduler with a smaller one is an earlier life."""
        return max(self.roster.scheduler_epoch, self._newest_link)

    def check_link(self, epoch: int) -> None:
        """Raise ProtocolError unless a link's number is of the life of the scheduler that we follow."""
        if not is_possible(epoch) or life_of(epoch) != life_of(self.roster.scheduler_epoch):
            raise ProtocolError(f"epoch {epoch} is not of the scheduler of epoch {self.roster.scheduler_epoch}")
        self._newest_link = max(self._newest_link, epoch)

    def handle_tick(self, _: Tick) -> None:
        self.say_status()
        if self.phase < LifePhase.DRAINING:
            if self.inbox.readdress():
                self._move()
            if self.phase is LifePhase.READY:
                self.send(self.scheduler, self.heartbeat())
            else:
                self.say_hello()
        self.on_tick()

    def _move(self) -> None:
        """Leave with the old address and join as a new life: messages to the old address are lost."""
        log.info("moved", address=self.inbox.address)
        self.send(self.scheduler, Goodbye(self.service, self.instance, self.epoch))
        self.epoch += 1
        self.on_moved()
        if self.phase is LifePhase.READY:
            self.say_hello()
            self.on_forgotten()

    def handle_roster(self, roster: Roster) -> None:
        old, epoch = self.roster, roster.scheduler_epoch
        if not self._following.hear(epoch):
            self._disbelieve(roster)
            return
        is_same_life = epoch == old.scheduler_epoch or old.scheduler_epoch in roster.former_epochs
        if epoch == old.scheduler_epoch and roster.version <= old.version and old.version:
            return
        self.roster = roster
        if epoch != old.scheduler_epoch:
            self._newest_link = 0
        if old.scheduler_epoch and not is_same_life:
            log.info("new_scheduler", epoch=epoch, epoch_before=old.scheduler_epoch)
            self.on_new_scheduler()
        known = any(member.instance == self.instance for member in roster.members)
        if not known and self.phase < LifePhase.DRAINING:
            self.say_hello()
            if self.phase is LifePhase.READY and is_same_life:
                self.on_forgotten()
        elif known and self.phase is LifePhase.STARTING:
            self.phase = LifePhase.READY
            log.info("ready", address=self.inbox.address)
        joined = [member for member in roster.members if member not in old.members]
        left = [member for member in old.members if member not in roster.members]
        for member in left:
            self.outbox.forget(member.address)
        if joined or left:
            self.on_roster(joined, left)
        self.renew_status()

    def _disbelieve(self, roster: Roster) -> None:
        """Drop a roster of an earlier life, or of no scheduler.  Raises ProtocolError where its epoch is impossible."""
        epoch, known = roster.scheduler_epoch, self.roster.scheduler_epoch
        if epoch > known or epoch < 0:
            raise ProtocolError(f"epoch {epoch} does not follow on {known}")
        self._num_unbelieved += 1
        if worth_a_line(self._num_unbelieved):
            log.warning("old_roster", epoch=epoch, epoch_known=known, num_old=self._num_unbelieved)

    def handle_refused(self, message: Refused) -> None:
        """A restart would not help: another life would be refused as well."""
        if message.instance == self.instance:
            why = f" ({why})" if (why := self.why_otherwise()) else ""
            raise ConfigError(f"refused by the scheduler: {message.reason}{why}")

    async def on_stop(self) -> None:
        self.send(self.scheduler, Goodbye(self.service, self.instance, self.epoch))
        self.outbox.flush()
