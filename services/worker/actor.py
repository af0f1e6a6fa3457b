"""The worker's shell: the event loop handles signals and heartbeats, the step thread runs the model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import structlog

from services.worker.adapters import AdapterLoading
from services.worker.blocks.block_desk import BlockDesk, MoveOrder
from services.worker.blocks.mover import BlockMover
from services.worker.blocks.serving import open_link
from services.worker.plans.checks import check_move, check_plan
from services.worker.plans.steps import Steps
from shared.actor import LifePhase, MemberActor
from shared.actor.actor import Handlers
from shared.actor.executor import Executor, InlineExecutor
from shared.config import Settings
from shared.data_link.listening import DataLink
from shared.errors import FatalError
from shared.messages import (
    FetchBlocks,
    Fingerprint,
    HoldAdapters,
    Leaving,
    MayLeave,
    OfferBlocks,
    PeerGone,
    Refused,
    ReportHoldings,
    Roster,
    ServeBlocks,
    ServiceName,
    StepPlan,
    StoreCapacity,
    Tick,
    WorkerCapacity,
    WorkerInbox,
    WorkerRole,
)
from shared.processes.standard_streams import drain_standard_streams
from shared.transport import Transport

if TYPE_CHECKING:  # a stand-in for the model needs no torch
    from engine.execution.runner import ModelRunner
    from services.worker.groups.ranks import AnyGroup

log = structlog.get_logger()


class WorkerActor(MemberActor):
    """Takes plans to the step thread; its results go straight to the scheduler.

    Plans of an older epoch are dropped, as are repeated ones; one of a newer epoch starts from empty rows.
    """

    service = ServiceName.WORKER
    inbox_union = WorkerInbox

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        load: Callable[[], ModelRunner],
        make_steps: Callable[[ModelRunner, Transport], Steps],
        make_loading: Callable[[AdapterLoading, Transport], Executor[HoldAdapters]] = InlineExecutor,
        ranks: AnyGroup | None = None,
    ) -> None:
        """`ranks`: the others of a group that this worker leads."""
        super().__init__(transport, settings)
        self.ranks = ranks
        self._load = load
        self._make_steps = make_steps
        self._capacity: WorkerCapacity | None = None
        self._fingerprint: Fingerprint | None = None
        self._no_native = ""  # why this worker has no native kernels
        self._steps: Steps | None = None
        self._mover: BlockMover | None = None  # None: no blocks move here
        self._link: DataLink | None = None  # None: no other worker may read its blocks
        self._make_loading = make_loading
        self._adapters: Executor[HoldAdapters] | None = None  # None: none are served

    def handlers(self) -> Handlers:
        return {
            StepPlan: self.handle_plan,
            ReportHoldings: self.handle_report_holdings,
            HoldAdapters: self.handle_hold_adapters,
            OfferBlocks: self.handle_move,
            FetchBlocks: self.handle_move,
            ServeBlocks: self.handle_move,
            MayLeave: self.handle_may_leave,
            PeerGone: self.handle_peer_gone,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    def capacity(self) -> WorkerCapacity | None:
        return self._capacity

    def store_capacity(self) -> StoreCapacity | None:
        """Where it serves its blocks."""
        return None if self._link is None else StoreCapacity(self._link.address, self._link.secret, 0)

    def fingerprint(self) -> Fingerprint | None:
        return self._fingerprint

    def why_otherwise(self) -> str:
        return f"this worker computes with torch: {self._no_native}" if self._no_native else ""

    async def on_start(self) -> None:
        saying = self.spawn(self._say_that_it_loads())
        runner = await asyncio.to_thread(self._load)
        saying.cancel()
        role = WorkerRole(self.settings.deployment.worker_role)
        self._capacity = msgspec.structs.replace(runner.capacity, role=role)
        self._fingerprint, self._no_native = runner.fingerprint, runner.no_native
        self._steps = self._make_steps(runner, self.transport)
        if runner.blocks is not None:
            directory = self.settings.deployment.runtime_path
            self._mover = BlockMover(runner.blocks, self.transport, directory, self._steps.submit)
            desk = BlockDesk(runner.blocks, self._mover)
            self._steps.move_by(desk)
            self._link = open_link(self.settings, self.inbox.address, self.instance, desk.served)
        if runner.adapters is not None:
            self._adapters = self._make_loading(AdapterLoading(runner.adapters), self.transport)
        await super().on_start()

    async def _say_that_it_loads(self) -> None:
        """Not READY, but not stuck.  A process that goes on with another group of ranks may load for minutes: the
        status file that its former life has left would grow old, and Kubernetes would end it."""
        while True:
            self.renew_status()
            await asyncio.sleep(self.settings.deployment.heartbeat_interval)

    def request_drain(self, deadline: float | None = None) -> None:
        """A worker that is still loading holds nothing and leaves at once."""
        if self._steps is None:
            drain_standard_streams()
            os._exit(0)
        super().request_drain(deadline)

    # -- leaving

    def on_drain(self, deadline: float) -> None:
        """Have the scheduler move what this worker computes to others, and go on with it until then."""
        is_known = any(member.instance == self.instance for member in self.roster.members)
        if self._link is None or not is_known or not self.scheduler_is_live:
            self.stop()  # what it computes is given back as it is
        else:
            self.send(self.scheduler, Leaving(self.instance, self.epoch))
            self.later(deadline - self.now, Tick())

    def handle_may_leave(self, message: MayLeave) -> None:
        if self.phase is LifePhase.DRAINING and (message.instance, message.epoch) == (self.instance, self.epoch):
            self.stop()

    def handle_peer_gone(self, message: PeerGone) -> None:
        """Without a scheduler none of its work goes on."""
        if self.phase is LifePhase.DRAINING and message.address == self.scheduler:
            self.stop()

    def on_new_scheduler(self) -> None:
        """It knows nothing of a worker that is about to leave."""
        if self.phase is LifePhase.DRAINING:
            self.stop()

    def on_moved(self) -> None:
        if self._link is not None:
            self._link.move(self.inbox.address)

    # -- work

    def handle_plan(self, plan: StepPlan) -> None:
        """Raises ProtocolError on a plan that is not from the scheduler of this life."""
        self.check_link(plan.epoch)
        if self._steps is None or self._capacity is None:
            return
        check_plan(plan, self._capacity)
        self._steps.submit(plan)
        for sequence in plan.admitted:
            if sequence.params.beam is not None and len(sequence.token_ids) > 4 * sequence.num_prompt_tokens:
                continue  # a beam search admits its beams again at each fork
            log.info(
                "sequence_admitted",
                request_id=sequence.request_id,
                trace_id=sequence.trace_id,
                index=sequence.index,
                row=sequence.row,
                step_id=plan.step_id,
            )

    def handle_report_holdings(self, message: ReportHoldings) -> None:
        """Answered by the step thread, when the plans before it have run.  Raises ProtocolError."""
        self.check_link(message.epoch)
        if self._steps is not None:
            self._steps.submit(message)

    def handle_move(self, order: MoveOrder) -> None:
        """Carried out by the step thread, in order with the plans.  Raises ProtocolError."""
        self.check_link(order.epoch)
        if self._steps is not None and self._capacity is not None:
            check_move(order, self._capacity)
            self._steps.submit(order)

    def handle_hold_adapters(self, message: HoldAdapters) -> None:
        """Answered when they are there; steps go on meanwhile.  Raises ProtocolError."""
        self.check_link(message.epoch)
        if self._adapters is not None:
            self._adapters.submit(message)

    @property
    def is_computing(self) -> bool:
        return self._steps is not None and self._steps.watch.is_computing(self.settings.deployment.stall_timeout)

    def stall(self) -> str:
        if self._steps is None or not self._steps.watch.is_stalled(self.settings.deployment.stall_timeout):
            return ""
        return f"a step has not ended within {self._steps.watch.limit(self.settings.deployment.stall_timeout):.0f} s"

    def on_tick(self) -> None:
        if self.ranks is not None and self.ranks.failure:
            raise FatalError(self.ranks.failure)
        if self._steps is None:
            return
        if self.phase is LifePhase.DRAINING:  # still alive: its sequences go on until they are elsewhere
            self.send(self.scheduler, self.heartbeat())
            if self.now >= self.leaves_by or not self.scheduler_is_live:
                self.stop()
        if self._steps.failure is not None:
            raise FatalError(f"a step failed: {self._steps.failure!r}") from self._steps.failure
        if self._adapters is not None and self._adapters.failure is not None:
            raise FatalError(f"loading failed: {self._adapters.failure!r}") from self._adapters.failure
        if self._steps.watch.is_hopeless(self.settings.deployment.stall_timeout):
            raise FatalError(f"a step has taken {self._steps.watch.seconds:.0f} s and does not end")

    async def run(self) -> None:
        """A process that goes on with another group must have nothing left of this one; others just end."""
        try:
            await super().run()
        finally:
            if self.ranks is not None and self.ranks.may_form_again:
                await self._close()

    async def on_stop(self) -> None:
        """Leave the roster, so that no plan comes any more; then end the thread, which would block the exit."""
        await super().on_stop()
        await self._close()
        if self.ranks is not None:
            await asyncio.to_thread(self.ranks.close)

    async def _close(self) -> None:
        for one in (self._link, self._steps, self._mover, self._adapters):
            if one is not None:
                await asyncio.to_thread(one.close)
