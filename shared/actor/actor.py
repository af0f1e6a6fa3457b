"""The run loop that every service shares."""

from __future__ import annotations

import asyncio
import gc
import math
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import structlog

from shared.actor.incident import Incidents
from shared.actor.metrics import MetricsPort
from shared.actor.status import STALLED, StatusFile
from shared.clocks.clock import steady_time
from shared.config import Settings
from shared.errors import FatalError, PageantError, ProtocolError
from shared.messages import Drain, Member, Message, PeerGone, ServiceName
from shared.processes.losses import losses
from shared.transport.link import Transport, worth_a_line

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

log = structlog.get_logger()

# Messages hold no cycles and what lives long is frozen, so collections are made rare.  What libraries leave in cycles,
# the contexts of calls and the traces of their errors, comes to some 25,000 objects until the second generation is
# collected, a few megabytes.  What was in use then waits for the third, which follows after six times as many.
GC_THRESHOLDS = (10_000, 5, 6)
PAUSE = 0.001  # seconds without mail after which what comes has not waited here

Handlers = Mapping[type[Message], Callable[[Any], None]]


class LifePhase(IntEnum):
    STARTING = 0
    READY = 1
    DRAINING = 2
    STOPPED = 3


class Actor(ABC):
    """One mailbox, one handler per message type, one flush per batch.

    Invariant: handlers run to completion one after another on the event loop; they change state and queue messages,
    and never await.  Whatever must wait runs in `spawn`ed tasks that come back as messages to oneself.
    """

    service: ClassVar[ServiceName]
    inbox_union: ClassVar[Any]

    def __init__(self, transport: Transport, settings: Settings, instance: str | None = None) -> None:
        self.settings = settings
        self.transport = transport
        self.instance = instance or f"{self.service}-{uuid.uuid4().hex[:8]}"
        self.epoch = 1 + secrets.randbits(40)  # differs between lives of one instance; its order means nothing
        self.started = self.now = steady_time()  # Unix seconds; `now` is set once for each batch of messages
        self.phase = LifePhase.STARTING
        self.leaves_by = math.inf  # by the steady clock; once it has been asked to leave
        self.progress = 0
        self.num_dropped = 0  # malformed messages
        self._place_lost = ""  # why no file can be made in the runtime directory
        self.stalled = ""  # why work waits without progress
        self.busy_since = time.time()  # Unix seconds; no pause between batches since then
        self.incidents: Incidents | None = None  # where there is a process to write them
        self.status_file = StatusFile(settings.deployment)
        self.metrics = MetricsPort(settings.observation, settings.gateway, self.collectors)
        self.inbox = transport.bind(self.inbox_name, self.inbox_union)
        self.outbox = transport.outbox()
        if PeerGone in get_args(self.inbox_union):
            self.outbox.on_gone = lambda address: self.post(PeerGone(address))
        self.tasks: asyncio.TaskGroup
        self._spawned: set[asyncio.Task[None]] = set()
        self._afterwards: list[Callable[[], None]] = []
        self._table: dict[type[Message], Callable[[Any], None]] = {}

    @property
    def inbox_name(self) -> str:
        return self.instance

    # -- for subclasses

    @abstractmethod
    def handlers(self) -> Handlers:
        """The handler of each message type in the inbox's union."""

    async def on_start(self) -> None:
        """Before the first message; may await."""

    def on_drain(self, deadline: float) -> None:
        """Asked to leave by `deadline` (of the steady clock): hand work over, then call `stop`."""
        self.stop()

    def on_hurry(self) -> None:
        """Asked again, and `leaves_by` is earlier now."""

    async def on_stop(self) -> None:
        """After the last message, before the sockets close; may await."""

    def before_flush(self) -> None:
        """After each batch of messages, before what they queued is sent."""

    def stall(self) -> str:
        """Why work waits without progress now; empty where there is progress, or no work."""
        return ""

    @property
    def status(self) -> str:
        """One word for the container's health check, for which READY and DRAINING are healthy."""
        return self.phase.name

    @property
    def known_members(self) -> list[Member]:
        """The deployment's live processes, as far as this one knows."""
        return []

    def collectors(self) -> list[Collector]:
        """What /metrics tells: of this process, and of what a subclass adds."""
        from shared.exposition import ProcessState, ServiceCollector

        state = ProcessState(
            service=str(self.service),
            instance=self.instance,
            started=self.started,
            progress=self.progress,
            num_dropped=self.num_dropped,
            num_undecodable=self.inbox.num_undecodable,
            phase=self.phase.name,
            is_stalled=bool(self.stalled),
            members=self.known_members,
            losses=losses(),
        )
        return [ServiceCollector(state)]

    def snapshot(self) -> Mapping[str, Any]:
        """The state for an incident: counts and ids, never prompts or outputs."""
        return {
            "phase": self.phase.name,
            "epoch": self.epoch,
            "progress": self.progress,
            "num_dropped": self.num_dropped,
            "num_undecodable": self.inbox.num_undecodable,
            "stalled": self.stalled,
        }

    # -- for handlers

    def send(self, address: str, message: Message) -> None:
        """Queue a message; it leaves with this batch's flush."""
        self.outbox.send(address, message)

    def afterwards(self, work: Callable[[], None]) -> None:
        """Do what can wait, such as a log line, once this batch's messages have left."""
        self._afterwards.append(work)

    def post(self, message: Message) -> None:
        """A message to oneself, handled after this batch."""
        self.inbox.post(message)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run background work until it ends or the actor stops; its failure stops the actor."""
        task = self.tasks.create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    def later(self, seconds: float, message: Message) -> None:
        """Post `message` to oneself once, unless the actor stops before."""
        asyncio.get_running_loop().call_later(max(0.0, seconds), self.post, message)

    def every(self, seconds: float, message: Message) -> None:
        """Post `message` to oneself repeatedly until the actor stops."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                self.post(message)

        self.spawn(repeat())

    def say_status(self) -> None:
        """At every tick: renew the status file, and note when work begins to wait and when it goes on."""
        self.metrics.open()
        self._keep_place()
        reason = self.stall()
        if reason and not self.stalled:
            log.error("stalled", reason=reason)
            if self.incidents is not None:
                self.incidents.write(reason)
        elif self.stalled and not reason:
            log.info("stall_over")
        self.stalled = reason
        self.renew_status()

    def renew_status(self) -> None:
        """Also where the status may have changed between ticks: a supervisor waits for READY."""
        self.status_file.say(STALLED if self.stalled else self.status)

    def _keep_place(self) -> None:
        """Restore the runtime directory after a deletion.  Raises ConfigError where it is another deployment's now."""
        try:
            renewed = self.transport.keep()
        except OSError as error:
            if self._place_lost != str(error):
                log.error("runtime_dir_lost", directory=str(self.settings.deployment.runtime_path), reason=str(error))
            self._place_lost = str(error)
            return
        if renewed:
            log.warning("runtime_dir_renewed", directory=str(self.settings.deployment.runtime_path), renewed=renewed)
        self._place_lost = ""

    def stop(self) -> None:
        """End the run loop after this batch."""
        self.phase = LifePhase.STOPPED

    @property
    def is_over(self) -> bool:
        return self.phase is LifePhase.STOPPED

    # -- the loop

    async def run(self) -> None:
        """Live until stopped.  Raises FatalError where a handler breaks an invariant."""
        try:
            self._table = self._checked(self.handlers())
            async with asyncio.TaskGroup() as self.tasks:
                await self.on_start()
                self.metrics.open()
                self.outbox.flush()
                gc.collect()
                gc.freeze()
                gc.set_threshold(*GC_THRESHOLDS)
                while self.phase is not LifePhase.STOPPED:
                    for message in await self._next_batch():
                        self._handle(message)
                    self.before_flush()
                    self.outbox.flush()
                    self._catch_up()
                await self.on_stop()
                for task in list(self._spawned):
                    task.cancel()
        finally:
            self.metrics.close()
            self.inbox.close()
            self.outbox.close()

    async def _next_batch(self) -> list[Message]:
        before = time.time()
        batch: list[Message] = await self.inbox.recv_batch()
        self.now = steady_time()
        now = time.time()
        if now - before > PAUSE:
            self.busy_since = now
        return batch

    def _catch_up(self) -> None:
        if self._afterwards:
            works, self._afterwards = self._afterwards, []
            for work in works:
                work()

    def request_drain(self, deadline: float | None = None) -> None:
        """Handles SIGTERM; callable from a signal handler on the loop."""
        self.post(Drain(deadline=deadline or steady_time() + self.settings.deployment.drain_timeout))

    def request_handover(self) -> None:
        """Handles SIGUSR1: leave while the others stay, with more time."""
        self.request_drain(steady_time() + self.settings.deployment.handover_timeout)

    def _handle(self, message: Message) -> None:
        try:
            if isinstance(message, Drain):
                self._drain(message)
            else:
                self._table[type(message)](message)
            self.progress += 1
        except ProtocolError as error:
            self.num_dropped += 1
            if worth_a_line(self.num_dropped):
                log.warning(
                    "message_dropped", type=type(message).__name__, reason=str(error), num_dropped=self.num_dropped
                )
        except PageantError:
            raise
        except Exception as error:
            raise FatalError(f"{type(message).__name__} could not be handled: {error!r}") from error

    def _drain(self, message: Drain) -> None:
        deadline = message.deadline or steady_time() + self.settings.deployment.drain_timeout
        if self.phase < LifePhase.DRAINING:
            self.phase = LifePhase.DRAINING
            self.leaves_by = deadline
            log.info("draining")
            self.on_drain(deadline)
        elif deadline < self.leaves_by:
            self.leaves_by = deadline
            self.on_hurry()

    def _checked(self, handlers: Handlers) -> dict[type[Message], Callable[[Any], None]]:
        expected = set(get_args(self.inbox_union)) - {Drain}
        if expected != set(handlers):
            names = sorted(kind.__name__ for kind in expected ^ set(handlers))
            raise FatalError(f"{type(self).__name__}: handlers do not match the inbox: {', '.join(names)}")
        return dict(handlers)
