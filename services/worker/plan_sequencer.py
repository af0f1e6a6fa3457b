"""Which plans may run: plans of the newest epoch, each once, in order."""

from __future__ import annotations

from typing import Protocol

import structlog

from shared.epochs import is_late
from shared.messages import Holdings, ReportHoldings, StepPlan, StepResult

log = structlog.get_logger()

Work = StepPlan | ReportHoldings  # messages of the scheduler, in order


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

    def take(self, work: Work) -> StepPlan | Holdings | None:
        """The plan, if it is to be run now; or the answer in its place; or None."""
        if is_late(work.epoch, self._epoch):
            log.info("late_work", type=type(work).__name__, epoch=work.epoch)
            return None
        return self._report(work) if isinstance(work, ReportHoldings) else self._take_plan(work)

    def _take_plan(self, plan: StepPlan) -> StepPlan | Holdings | None:
        if plan.epoch != self._epoch:  # a newer epoch, or another life of the scheduler
            self._rows.reset()
            self._epoch, self._due_step_id = plan.epoch, 0
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
