"""The scheduler's shell: messages in, core called, messages out; it has the clock, the sockets and the log."""

from __future__ import annotations

import time

import structlog

from services.scheduler.journal import Note
from services.scheduler.load import load_of
from services.scheduler.policy import Policy
from services.scheduler.roster import Troupe
from services.scheduler.scheduler import Scheduler
from shared.actor import Actor, Phase
from shared.actor.actor import Handlers
from shared.actor.status import write_status
from shared.config import Settings
from shared.errors import ProtocolError, RejectCode, RequestError
from shared.logging import request_logger
from shared.messages import (
    AbortRequest,
    AddRequest,
    GetLoad,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Refused,
    Roster,
    SchedulerInbox,
    ServiceName,
    StepResult,
    StopMatched,
    StreamLost,
    Tick,
    schema_hash,
)
from shared.transport import Transport

log = structlog.get_logger()


class SchedulerActor(Actor):
    """Serves the roster and drives every worker, two steps ahead."""

    service = ServiceName.SCHEDULER
    inbox_union = SchedulerInbox

    def __init__(self, transport: Transport, settings: Settings, policy: Policy) -> None:
        super().__init__(transport, settings)
        self.core = Scheduler(policy)
        self.troupe = Troupe()
        self._drain_deadline = 0.0
        self._last_epoch = 0

    @property
    def inbox_name(self) -> str:
        return "scheduler"

    def handlers(self) -> Handlers:
        return {
            AddRequest: self.handle_add,
            AbortRequest: self.handle_abort,
            StepResult: self.handle_result,
            StopMatched: self.core.stop_matched,
            StreamLost: self.core.stream_lost,
            Hello: self.handle_hello,
            Heartbeat: self.handle_heartbeat,
            Goodbye: self.handle_goodbye,
            GetLoad: self.handle_get_load,
            Tick: self.handle_tick,
        }

    async def on_start(self) -> None:
        self.every(self.settings.heartbeat_interval, Tick())
        self.phase = Phase.READY
        log.info("ready", address=self.inbox.address)

    # -- requests

    def handle_add(self, message: AddRequest) -> None:
        if self.phase is Phase.DRAINING:
            error = RequestError("the scheduler is leaving", code=RejectCode.UNAVAILABLE, retry_after_ms=1000)
            self.core.outbound.reject(message.header.gateway, message.header.request_id, error)
            return
        self.core.add(message, time.time())

    def handle_abort(self, message: AbortRequest) -> None:
        self.core.abort(message.request_id)

    def handle_get_load(self, message: GetLoad) -> None:
        self.send(message.gateway, load_of(self.core, message.request_id))

    # -- steps

    def handle_result(self, message: StepResult) -> None:
        for replica in self.core.replicas.values():
            if replica.epoch == message.epoch:
                instance = replica.instance
                break
        else:
            log.info("stale_result", epoch=message.epoch, step_id=message.step_id)
            return
        try:
            self.core.apply(instance, message)
        except ProtocolError as error:
            log.error("worker_out_of_step", worker=instance, reason=str(error))
            self._restart_link(instance)

    def _restart_link(self, instance: str) -> None:
        """Start over with a worker whose answers make no sense: a new epoch, an empty pool."""
        capacity = self.core.replicas[instance].capacity
        self.core.lose_worker(instance)
        self.core.add_worker(instance, self._new_epoch(), capacity)

    def _new_epoch(self) -> int:
        """Greater than any epoch before, on this scheduler or an earlier one."""
        self._last_epoch = max(self._last_epoch + 1, time.time_ns() // 1000)
        return self._last_epoch

    def before_flush(self) -> None:
        for instance in self.core.replicas:
            while plan := self.core.schedule(instance):
                self.send(self.troupe.address_of(instance), plan)
        for address, batch in self.core.outbound.take_batches().items():
            self.send(address, batch)
        for gateway, rejection in self.core.outbound.take_rejections():
            self.send(gateway, rejection)
        if notes := self.core.journal.take():
            self.afterwards(lambda: write_notes(notes))
        if self.phase is Phase.DRAINING and not self.core.requests:
            self.stop()

    # -- the troupe

    def handle_hello(self, message: Hello) -> None:
        if reason := self.troupe.refusal(message, schema_hash()):
            log.warning("refused", instance_refused=message.instance, reason=reason)
            self.send(message.address, Refused(message.instance, reason))
            return
        is_new = self.troupe.join(message, time.monotonic())
        if message.worker is not None and (is_new or message.instance not in self.core.replicas):
            self.core.add_worker(message.instance, self._new_epoch(), message.worker)
        if is_new:
            log.info("joined", member=message.instance, address=message.address)
            self._membership_changed()
        else:
            self.send(message.address, self._roster())

    def handle_heartbeat(self, message: Heartbeat) -> None:
        if not self.troupe.heard(message.instance, message.epoch, time.monotonic()) and message.address:
            self.send(message.address, self._roster())  # it is not in there: it will say hello

    def handle_goodbye(self, message: Goodbye) -> None:
        if member := self.troupe.leave(message.instance, message.epoch):
            log.info("left", member=member.instance)
            self.core.retire_worker(member.instance)
            self._without(member)

    def handle_tick(self, _: Tick) -> None:
        for member in self.troupe.silent(time.monotonic(), self.settings.heartbeat_timeout):
            log.warning("lost", member=member.instance)
            self.troupe.leave(member.instance, member.epoch)
            self.core.lose_worker(member.instance)
            self._without(member)
        self.core.expire(time.time())
        self._broadcast()
        write_status(self.settings, self.phase.name)
        if self.phase is Phase.DRAINING and time.time() > self._drain_deadline:
            for request in list(self.core.requests.values()):
                self.core.fail(request, RequestError("the scheduler has left", code=RejectCode.UNAVAILABLE))

    def _without(self, member: Member) -> None:
        if member.service == ServiceName.GATEWAY:
            self.core.abort_gateway(member.address)
        self.outbox.forget(member.address)
        self._membership_changed()

    def _membership_changed(self) -> None:
        self.core.set_detokenizers(self.troupe.addresses(ServiceName.DETOKENIZER))
        self._broadcast()

    def _roster(self) -> Roster:
        return Roster(
            scheduler_epoch=self.epoch,
            version=self.troupe.version,
            members=self.troupe.members,
            model=self.core.capacity,
            max_model_len=self.core.max_model_len,
            max_input_length=self.core.max_input_length,
        )

    def _broadcast(self) -> None:
        roster = self._roster()
        for member in self.troupe.members:
            self.send(member.address, roster)

    # -- the end

    def on_drain(self, deadline: float) -> None:
        """Finish what is running, up to the deadline; then what is left ends with UNAVAILABLE."""
        self._drain_deadline = deadline


def write_notes(notes: list[Note]) -> None:
    for note in notes:
        request_logger(log, note.header).info(note.event, **note.fields)
