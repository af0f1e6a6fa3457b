"""The worker's shell: the event loop handles signals and heartbeats, the step thread runs the model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from services.worker.checks import check_plan
from services.worker.steps import Steps
from shared.actor import MemberActor
from shared.actor.actor import Handlers
from shared.config import Settings
from shared.errors import FatalError
from shared.messages import (
    Fingerprint,
    Refused,
    ReportHoldings,
    Roster,
    ServiceName,
    StepPlan,
    Tick,
    WorkerCapacity,
    WorkerInbox,
)
from shared.standard_streams import drain_standard_streams
from shared.transport import Transport

if TYPE_CHECKING:  # a stand-in for the model needs no torch
    from engine.execution.runner import ModelRunner

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
    ) -> None:
        super().__init__(transport, settings)
        self._load = load
        self._make_steps = make_steps
        self._capacity: WorkerCapacity | None = None
        self._fingerprint: Fingerprint | None = None
        self._no_native = ""  # why this worker has no native kernels
        self._steps: Steps | None = None

    def handlers(self) -> Handlers:
        return {
            StepPlan: self.handle_plan,
            ReportHoldings: self.handle_report_holdings,
            Roster: self.handle_roster,
            Refused: self.handle_refused,
            Tick: self.handle_tick,
        }

    def capacity(self) -> WorkerCapacity | None:
        return self._capacity

    def fingerprint(self) -> Fingerprint | None:
        return self._fingerprint

    def why_otherwise(self) -> str:
        return f"this worker computes with torch: {self._no_native}" if self._no_native else ""

    async def on_start(self) -> None:
        runner = await asyncio.to_thread(self._load)
        self._capacity, self._fingerprint, self._no_native = runner.capacity, runner.fingerprint, runner.no_native
        self._steps = self._make_steps(runner, self.transport)
        await super().on_start()

    def request_drain(self, deadline: float | None = None) -> None:
        """A worker that is still loading holds nothing and leaves at once."""
        if self._steps is None:
            drain_standard_streams()
            os._exit(0)
        super().request_drain(deadline)

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

    @property
    def is_computing(self) -> bool:
        return self._steps is not None and self._steps.watch.is_computing(self.settings.deployment.stall_timeout)

    def stall(self) -> str:
        if self._steps is None or not self._steps.watch.is_stalled(self.settings.deployment.stall_timeout):
            return ""
        return f"a step has not ended within {self._steps.watch.limit(self.settings.deployment.stall_timeout):.0f} s"

    def on_tick(self) -> None:
        if self._steps is None:
            return
        if self._steps.failure is not None:
            raise FatalError(f"a step failed: {self._steps.failure!r}") from self._steps.failure
        if self._steps.watch.is_hopeless(self.settings.deployment.stall_timeout):
            raise FatalError(f"a step has taken {self._steps.watch.seconds:.0f} s and does not end")

    async def on_stop(self) -> None:
        """Leave the roster, so that no plan comes any more; then end the thread, which would block the exit."""
        await super().on_stop()
        if self._steps is not None:
            await asyncio.to_thread(self._steps.close)
