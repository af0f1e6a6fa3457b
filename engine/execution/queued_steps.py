"""Steps whose tokens the model takes itself: at once, or while the host goes on.

The host knows what such a step changes but for its tokens, which the model puts behind the rows' histories.  So the
next one is queued before this one ends, and nothing that the host does stands between two of them.  Short steps are not
worth the waking of threads.
"""

from __future__ import annotations

import time
from functools import partial

from engine.execution.constraints.constrained_step import ConstrainedStep
from engine.execution.outputs.pending_result import PendingResult
from engine.execution.outputs.results import StepOutputs, make_result
from engine.execution.outputs.sampled_tokens import SampledTokens
from engine.execution.schedule import Schedule
from engine.execution.tables.rows import RowTable
from engine.modeling.model import QueuesSteps
from engine.modeling.pool_backing import IdleTime
from kernels.cpu.binding.queued import QueuedStep
from kernels.ops.sampling.sampled_columns import SampledColumns
from shared.messages.steps import RefusedRow, StepPlan

SHORT = 0.002  # seconds


class QueuedSteps:
    """Invariant: rows that are in `_rows`, and no others, may be in a step that is not computed yet."""

    def __init__(self, model: QueuesSteps | None, table: RowTable, idle: IdleTime) -> None:
        """`model`: without states; None: there are no such steps."""
        self._model = model
        self._table = table
        self._idle = idle
        self._last: QueuedStep | None = None  # that may not be computed yet
        self._rows: set[int] = set()
        self._seconds: dict[int, float] = {}  # of the last step, by binary digits of its number of tokens

    @property
    def is_on(self) -> bool:
        """Whether there may be such steps."""
        return self._model is not None and self._model.queues

    @property
    def is_empty(self) -> bool:
        return self._last is None

    def catch_up(self) -> None:
        """Wait for all."""
        if self._last is not None:
            self._last.wait()
            self._forget()

    def _forget(self) -> None:
        self._last = None
        self._rows.clear()

    def disturbs(self, plan: StepPlan) -> bool:
        """Whether a plan overwrites what queued steps read: histories of rows, or blocks."""
        if self._last is None:
            return False
        copies = plan.block_copies or any(part.block_copies for part in plan.sliding)
        return bool(copies) or any(sequence.row in self._rows for sequence in plan.admitted)

    def call(self) -> None:
        """From any thread: one that waits for a step, or is about to, does not."""
        if self._model is not None:
            self._model.call()

    def taken(self, held: ConstrainedStep | None) -> Schedule | None:
        """The schedule of a step whose tokens the model takes itself; None where the host has to look at what the
        model computes before."""
        if held is None or held.helds or not self.is_on:
            return None
        schedule = held.schedule
        if schedule.drafts is not None or len(schedule.scored) or len(schedule.pooled):
            return None
        return schedule if self._table.columns.raw[schedule.positions.rows].all() else None

    def is_short(self, plan: StepPlan) -> bool:
        """As far as is known."""
        return self._seconds.get(_size(plan), SHORT) < SHORT

    def put(self, plan: StepPlan, fenced: list[RefusedRow], schedule: Schedule) -> PendingResult:
        """Queue what is `taken`."""
        assert self._model is not None
        step = self._model.queue(schedule.batch, self._sampled(schedule))
        self._last = step
        self._rows.update(plan.rows)
        self._count(schedule)
        sampled = SampledTokens(schedule, None, step.token_ids, None, step)
        has_ended, seconds = partial(self._model.has_ended, step), partial(self._end, step, _size(plan))
        return PendingResult(partial(make_result, plan, fenced, _outputs(sampled)), seconds, has_ended)

    def compute(self, plan: StepPlan, fenced: list[RefusedRow], schedule: Schedule) -> PendingResult:
        """The same at once, behind what is queued."""
        assert self._model is not None
        begin = time.perf_counter()
        token_ids = self._model.take(schedule.batch, self._sampled(schedule))
        self._seconds[_size(plan)] = seconds = time.perf_counter() - begin
        self._count(schedule)
        sampled = SampledTokens(schedule, None, token_ids, None)
        return PendingResult(partial(make_result, plan, fenced, _outputs(sampled)), lambda: seconds)

    def _sampled(self, schedule: Schedule) -> SampledColumns | None:
        columns, rows = self._table.columns, schedule.positions.rows
        return None if columns.plain[rows].all() else columns.sampled(schedule.batch.rows)

    def _count(self, schedule: Schedule) -> None:
        """What the step computes and takes belongs to the rows."""
        batch = schedule.batch
        self._table.num_computed[batch.rows] = batch.computed + batch.scheduled
        self._table.num_tokens[schedule.positions.rows] = schedule.positions.lengths + 1

    def _end(self, step: QueuedStep, size: int) -> float:
        """Its seconds, which are waited for."""
        self._seconds[size] = seconds = step.seconds()
        if step is self._last:
            self._forget()
            self._idle.go_on()
        return seconds


def _size(plan: StepPlan) -> int:
    return sum(plan.num_scheduled_tokens).bit_length()


def _outputs(sampled: SampledTokens) -> StepOutputs:
    return StepOutputs(sampled, None, {}, {}, {}, [], [])
