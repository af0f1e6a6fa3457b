"""The scheduler's shell: messages in, core called, messages out; it has the clock, the sockets and the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from services.scheduler.block_traffic import BlockTraffic
from services.scheduler.consistency.results import StepLost
from services.scheduler.links import Links
from services.scheduler.load import load_of, snapshot_of
from services.scheduler.membership.deployment import with_fingerprint
from services.scheduler.membership.lives import Lives
from services.scheduler.membership.roster import Membership
from services.scheduler.scheduler import Scheduler
from services.scheduler.sleep import ModelSleep
from services.scheduler.telemetry.journal import write_notes
from services.scheduler.telemetry.stalls import StallWatch
from services.scheduler.telemetry.steplog import StepLog, StepMeter
from shared.actor import Actor, LifePhase
from shared.actor.actor import Handlers
from shared.clocks.deadlines import received
from shared.config import Settings
from shared.errors import ProtocolError
from shared.messages import (
    HAS_EVERYTHING,
    AbortRequest,
    AdaptersHeld,
    AddRequest,
    AttachRequest,
    BlocksMoved,
    DraftProposals,
    GetLoad,
    Goodbye,
    Heartbeat,
    Hello,
    Holdings,
    Leaving,
    LoadAdapter,
    Member,
    PeerGone,
    Refused,
    Roster,
    SchedulerInbox,
    ServiceName,
    StepResult,
    StopMatched,
    StoreContents,
    StreamLost,
    Tick,
    UnloadAdapter,
    Wake,
    schema_hash,
)
from shared.transport import Transport

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

log = structlog.get_logger()


class SchedulerActor(Actor):
    """Serves the roster and drives every worker, two steps ahead."""

    service = ServiceName.SCHEDULER
    inbox_union = SchedulerInbox

    def __init__(self, transport: Transport, settings: Settings, core: Scheduler, lives: Lives | None = None) -> None:
        super().__init__(transport, settings)
        self.lives = lives or Lives()
        self.epoch = self.lives.epoch
        self.core = core
        self.links = Links(core, self.lives)
        self.sleep = ModelSleep(core, settings.models.activity_dir)
        self.membership = Membership(mixed_workers=settings.engine.mixed_workers)
        self.traffic = BlockTraffic(core, self.membership, self.send)
        self.steps = StepLog() if settings.observation.log_steps else StepMeter()
        self._stalls = StallWatch(settings.deployment.stall_timeout)
        self._last_tick, self._last_reconciled, self._wake_time = self.now, self.now, 0.0
        self._adapters_version = 0  # that the members know

    @property
    def inbox_name(self) -> str:
        return "scheduler"

    def handlers(self) -> Handlers:
        return {
            AddRequest: self.handle_add,
            AbortRequest: self.handle_abort,
            AttachRequest: self.handle_attach,
            StepResult: self.handle_result,
            Holdings: self.handle_holdings,
            StopMatched: self.core.stop_matched,
            StreamLost: self.core.stream_lost,
            DraftProposals: self.handle_proposals,
            Wake: self.handle_wake,
            Hello: self.handle_hello,
            Heartbeat: self.handle_heartbeat,
            Goodbye: self.handle_goodbye,
            PeerGone: self.handle_peer_gone,
            GetLoad: self.handle_get_load,
            LoadAdapter: self.core.adapters.load,
            UnloadAdapter: self.core.adapters.unload,
            AdaptersHeld: self.core.adapters.held,
            BlocksMoved: self.core.moves.moved,
            StoreContents: self.core.moves.told,
            Leaving: self.traffic.leaving,
            Tick: self.handle_tick,
        }

    async def on_start(self) -> None:
        self.every(self.settings.deployment.heartbeat_interval, Tick())
        self.phase = LifePhase.READY
        self.renew_status()
        log.info("ready", address=self.inbox.address)

    # -- requests

    def handle_add(self, message: AddRequest) -> None:
        message = msgspec.structs.replace(message, header=received(message.header))
        if not self.sleep.hold(message, self.now):
            self.core.add(message, self.now)

    def handle_attach(self, message: AttachRequest) -> None:
        message = received(message)
        if not self.sleep.attach(message):
            self.core.attach(message, self.now)

    def handle_abort(self, message: AbortRequest) -> None:
        self.sleep.abort(message.request_id, message.gateway)
        self.core.abort(message.request_id, message.gateway, has_everything=message.reason == HAS_EVERYTHING)

    def handle_get_load(self, message: GetLoad) -> None:
        self.send(message.gateway, load_of(self.core, message.request_id, self.steps.tokens, self.sleep.counts))

    # -- steps

    def handle_result(self, message: StepResult) -> None:
        replica = next((r for r in self.core.replicas.values() if r.epoch == message.epoch), None)
        if replica is None:
            log.info("stale_result", epoch=message.epoch, step_id=message.step_id)
            return
        oldest = replica.in_flight[0] if replica.in_flight else None
        try:
            if not self.core.apply(replica.instance, message, self.now):
                log.info("repeated_result", epoch=message.epoch, step_id=message.step_id)
                return
        except StepLost as error:
            self.links.renew(replica.instance, error)
            return
        except ProtocolError as error:
            self.links.restart(replica.instance, error)
            return
        if oldest is not None and (line := self.steps.answered(replica, oldest, message, self.now)):
            self.afterwards(lambda: log.info("step_finished", **line))

    # -- ledgers

    def handle_holdings(self, message: Holdings) -> None:
        try:
            if not self.core.reconcile(message):
                log.info("stale_holdings", epoch=message.epoch, report_id=message.report_id)
        except StepLost as error:
            holders = (name for name, replica in self.core.replicas.items() if replica.epoch == message.epoch)
            self.links.renew(next(holders), error)

    def _reconcile(self) -> None:
        """Ask every worker what it holds, and check our own ledger once urgent messages are sent."""
        for instance in self.core.replicas:
            self.send(self.membership.address_of(instance), self.core.ask_holdings(instance))
        self.afterwards(self._check_ledgers)

    def _check_ledgers(self) -> None:
        self.core.check_ledgers()
        self._tell_alarms()

    def _tell_alarms(self) -> None:
        for alarm in self.core.journal.take_alarms():
            log.error(alarm.event, **alarm.fields)
            if self.incidents is not None:
                self.incidents.write(alarm.event)

    def before_flush(self) -> None:
        for instance, replica in self.core.replicas.items():
            while plan := self.core.schedule(instance, self.now):
                self.send(self.membership.address_of(instance), plan)
                self.steps.planned(replica, plan, self.now)
        self.traffic.dispatch(self.now)
        self._speculate(self.now)
        for address, batch in self.core.outbound.take_batches().items():
            self.send(address, batch)
        for gateway, rejection in self.core.outbound.take_rejections():
            self.send(gateway, rejection)
        self._tell_adapters()
        self._tell_alarms()
        self.sleep.tell()
        if (notes := self.core.journal.take()) and self.settings.observation.tracing:
            self.afterwards(lambda: write_notes(log, notes))

    def _tell_adapters(self) -> None:
        """A gateway knows a name before it hears that it was loaded."""
        adapters = self.core.adapters
        for instance, order in adapters.take_orders() if adapters.has_orders else ():
            self.send(self.membership.address_of(instance), order)
        if adapters.version != self._adapters_version:
            self._adapters_version = adapters.version
            self._broadcast()
        for gateway, answer in adapters.take_answers():
            self.send(gateway, answer)

    # -- drafts

    def handle_proposals(self, message: DraftProposals) -> None:
        try:
            if not self.core.propose(message):
                log.info("stale_proposals", epoch=message.epoch, update_id=message.update_id)
        except ProtocolError as error:
            self.links.restart_draft(message.epoch, error)

    def handle_wake(self, _: Wake) -> None:
        self._wake_time = 0.0

    def _speculate(self, now: float) -> None:
        for instance, update in self.core.take_updates() if self.core.drafts else ():
            self.send(self.membership.address_of(instance), update)
        if (wake_time := self.core.wake_time) is not None and wake_time != self._wake_time:
            self._wake_time = wake_time
            self.later(wake_time - now, Wake())

    # -- members

    def _agree(self, message: Hello | Heartbeat) -> None:
        """A member may know a greater epoch, after the file that counts lives was lost.  Then this life takes one that
        is greater still, or members would take it for an earlier life; all links begin again with it."""
        if not self.lives.pass_by(message.newest_epoch):
            return
        log.warning("epoch_raised", epoch=self.lives.epoch, epoch_before=self.epoch, member=message.instance)
        self.epoch = self.lives.epoch
        self._broadcast()
        self.links.renew_all()

    def handle_hello(self, message: Hello) -> None:
        if reason := self.membership.refusal(message, schema_hash(), is_alive=self.is_alive):
            self._refuse(message.instance, message.address, reason)
            return
        self._agree(message)
        message = with_fingerprint(message)
        self._dismiss_usurpers(message)
        if message.adapters:
            self.core.adapters.learn(message)
        if self.membership.is_back(message):
            self.core.deaths.take_back(message.instance)
        is_new = self.membership.join(message, self.now)
        if self.links.greet(message, is_new=is_new):
            self.sleep.release(self.now)
        self.traffic.greet(message)
        if is_new:
            log.info("joined", member=message.instance, address=message.address)
            self._membership_changed()
        else:
            self.send(message.address, self._roster())
            if message.instance in self.core.replicas:  # it was cut off for a while: messages under way may be lost
                self.send(message.address, self.core.ask_holdings(message.instance))

    @property
    def is_alive(self) -> bool:
        """Whether requests are alive, here or, from an earlier scheduler, at the gateways."""
        return self.core.is_alive or self.membership.has_streams

    def _refuse(self, instance: str, address: str, reason: str) -> None:
        log.warning("refused", instance_refused=instance, reason=reason)
        self.send(address, Refused(instance, reason))

    def _dismiss_usurpers(self, hello: Hello) -> None:
        """Refuse the workers that joined before this gateway and would go on with its streams in other bits.  A worker
        that has begun streams of its own meanwhile stays: the earlier streams wait for workers of their kind."""
        begun = {request.bound_to for request in self.core.requests.values()}
        for instance, reason in self.membership.recall(hello).items():
            if (replica := self.core.replicas.get(instance)) is not None and replica.capacity.fingerprint in begun:
                continue
            member = next(member for member in self.membership.members if member.instance == instance)
            self._refuse(instance, member.address, reason)
            self.outbox.flush()  # before it is forgotten
            self._lose(member, "its results would differ from those of the worker that began the open requests")

    def handle_heartbeat(self, message: Heartbeat) -> None:
        self._agree(message)
        if not self.membership.heard(message, self.now) and message.address:
            self.send(message.address, self._roster())  # it is not on it, and will send a hello

    def handle_goodbye(self, message: Goodbye) -> None:
        if member := self.membership.leave(message.instance, message.epoch):
            log.info("left", member=member.instance)
            self.core.retire_worker(member.instance)
            self._without(member)

    def handle_peer_gone(self, message: PeerGone) -> None:
        for member in self.membership.members:
            if member.address == message.address:
                self._lose(member, "its process has ended")

    def handle_tick(self, _: Tick) -> None:
        now = self.now
        if now - self._last_tick > self.settings.deployment.heartbeat_timeout / 2:
            self.membership.excuse(now)  # this process stood still: messages from that time are not read yet
        self._last_tick = now
        for member in self.membership.take_silent(now, self.settings.deployment.heartbeat_timeout):
            self._lose(member, "it is silent")
        self.core.expire(self.now)
        self.sleep.tick(self.now, len(self.membership.addresses(ServiceName.GATEWAY)))
        if now - self._last_reconciled >= self.settings.deployment.reconcile_interval:
            self._last_reconciled = now
            self._reconcile()
        self._broadcast()
        self.say_status()

    def _lose(self, member: Member, reason: str) -> None:
        log.warning("lost", member=member.instance, reason=reason)
        self.membership.leave(member.instance, member.epoch)
        self.core.lose_worker(member.instance, self.now)
        self._without(member)

    def _without(self, member: Member) -> None:
        self.core.lose_draft(member.instance)
        self.core.moves.leave(member.instance)
        self.sleep.book()
        if member.service == ServiceName.GATEWAY:
            self.core.abort_gateway(member.address)
            self.sleep.abort_gateway(member.address)
        self.outbox.forget(member.address)
        self._membership_changed()

    def _membership_changed(self) -> None:
        self.core.set_detokenizers(self.membership.addresses(ServiceName.DETOKENIZER))
        self._broadcast()

    def _roster(self) -> Roster:
        model, max_model_len, max_input_length = self.sleep.limits
        return Roster(
            scheduler_epoch=self.epoch,
            version=self.membership.version + self.core.adapters.version + self.sleep.version,
            members=self.membership.members, is_asleep=self.sleep.is_asleep,
            model=model, max_model_len=max_model_len, max_input_length=max_input_length,
            stalled="; ".join(filter(None, (self.stalled, *self.membership.stalled))),
            fingerprints=self.membership.fingerprints(is_alive=self.is_alive), former_epochs=self.lives.former,
            adapters=[adapter for _, adapter in sorted(self.core.adapters.known.items())],
        )  # fmt: skip

    def _broadcast(self) -> None:
        roster = self._roster()
        for member in self.membership.members:
            self.send(member.address, roster)

    # -- state

    def stall(self) -> str:
        stuck = self._stalls.look(self.core.replicas.values(), self.membership.computing, self.now)
        return f"work waits at {', '.join(stuck)}, and no step is computed there" if stuck else ""

    @property
    def known_members(self) -> list[Member]:
        return self.membership.members

    def collectors(self) -> list[Collector]:
        from shared.exposition import EngineCollector

        load, name = load_of(self.core, "", self.steps.tokens, self.sleep.counts), self.settings.engine.model_name
        return [*super().collectors(), EngineCollector(name, load, self.settings.memory.cache_labels)]

    def snapshot(self) -> Mapping[str, Any]:
        return {**super().snapshot(), **snapshot_of(self.core), "members": self.membership.members}

    # -- the end

    def on_drain(self, deadline: float) -> None:
        """Leave at once: the gateways know what their streams have, and ask the next life to continue."""
        self.stop()
