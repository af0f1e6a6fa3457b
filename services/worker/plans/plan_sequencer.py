"""Which plans may run: plans of the newest epoch, each once, in order; and which moves of blocks go with them."""

from __future__ import annotations

from typing import Protocol

import structlog

from services.worker.blocks.block_desk import Arrived, MoveOrder
from shared.clocks.epochs import is_late
from shared.messages import Holdings, ReportHoldings, StepPlan, StepResult

log = structlog.get_logger()

Work = StepPlan | ReportHoldings | MoveOrder | Arrived  # messages of the scheduler, in order; what was fetched


class RowHolder(Protocol):
    """What the sequencer needs of the model runner: its rows."""

    def reset(self) -> None: ...

    def holdings(self) -> tuple[list[int], list[int]]: ...


class PlanSequencer:
    """Holds the link's epoch and the number of the plan that is due.

    A connection that breaks and is made anew may lose plans, or deliver them late or twice.  Late and repeated plans
    are dropped; a missing one is reported to the scheduler, which then begins a new epoch.
    """

    def __init__(self, rows: RowHolder) -> None:
        self._rows = rows
        self._epoch = 0
        self._due_step_id = 0

    def take(self, work: Work) -> StepPlan | Holdings | MoveOrder | Arrived | None:
        """The plan or the move, if it is to be done now; or the answer in its place; or None."""
        if is_late(work.epoch, self._epoch):
            log.info("late_work", type=type(work).__name__, epoch=work.epoch)
            return None
        if isinstance(work, ReportHoldings):
            return self._report(work)
        if isinstance(work, StepPlan):
            return self._take_plan(work)
        if isinstance(work, Arrived):
            return work if work.epoch == self._epoch else None
        self._begin(work.epoch)
        if self._due_step_id < work.next_step_id:  # a plan is missing: the next one, or a report, says so
            log.info("early_move", epoch=work.epoch, move_id=work.move_id, step_id=self._due_step_id)
            return None
        return work

    def is_next(self, work: Work) -> bool:
        """Whether this is the plan that is due in the current epoch."""
        return isinstance(work, StepPlan) and (work.epoch, work.step_id) == (self._epoch, self._due_step_id)

    def _begin(self, epoch: int) -> None:
        """A newer epoch, or another life of the scheduler, if it is not the one that is known."""
        if epoch != self._epoch:
            self._rows.reset()
            self._epoch, self._due_step_id = epoch, 0

    def _take_plan(self, plan: StepPlan) -> StepPlan | Holdings | None:
        self._begin(plan.epoch)
        if plan.step_id < self._due_step_id:
            log.info("repeated_plan", epoch=plan.epoch, step_id=plan.step_id)
            return None
        if plan.step_id > self._due_step_id:
            log.error("plan_missing", epoch=plan.epoch, step_id=self._due_step_id, next_step_id=plan.step_id)
            return Holdings(plan.epoch, 0, plan.step_id, self._due_step_id)
        self._due_step_id += 1
        return plan

    def _report(self, asked: ReportHoldings) -> Holdings:
        """The rows hold nothing of another epoch than the last plan's."""
        if asked.epoch != self._epoch:
            return Holdings(asked.epoch, asked.report_id, asked.next_step_id, 0)
        return Holdings(asked.epoch, asked.report_id, asked.next_step_id, self._due_step_id, *self._rows.holdings())


def note_refused(result: StepResult) -> None:
    for refused in result.refused_rows:
        log.error(
            "row_refused",
            step_id=result.step_id,
            entry=refused.entry,
            reason=str(refused.reason),
            block_id=refused.block_id,
            generation=refused.generation,
            known=refused.known,
        )
