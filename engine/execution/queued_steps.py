"""Steps that the model computes while the host goes on: the next one is queued before this one ends, so that nothing
that the host does stands between two of them.

The host knows what such a step changes but for its tokens, which the model puts behind the rows' histories itself.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from engine.execution.pending_result import PendingResult
from engine.execution.results import StepOutputs, make_result
from engine.execution.rows import RowTable
from engine.execution.sampled_tokens import SampledTokens
from engine.execution.schedule import Schedule
from engine.modeling.model import QueuesSteps
from engine.modeling.pool_backing import IdleTime
from kernels.cpu.queued import QueuedStep
from shared.messages.steps import RefusedRow, StepPlan


class QueuedSteps:
    """Invariant: rows that are in `_rows`, and no others, may be in a step that is not computed yet."""

    def __init__(self, model: QueuesSteps, table: RowTable, idle: IdleTime) -> None:
        """Of a model without states."""
        self._model = model
        self._table = table
        self._idle = idle
        self._last: QueuedStep | None = None  # that may not be computed yet
        self._rows: set[int] = set()

    @property
    def is_on(self) -> bool:
        """Whether any step is queued."""
        return self._model.queues

    @property
    def is_empty(self) -> bool:
        return self._last is None

    def catch_up(self) -> None:
        """Wait for all."""
        if self._last is not None:
            self._last.wait()
            self._last = None
            self._rows.clear()

    def make_way(self, plan: StepPlan) -> None:
        """Wait where a plan overwrites what queued steps read: histories of rows, or blocks."""
        copies = plan.block_copies or any(part.block_copies for part in plan.sliding)
        if copies or any(sequence.row in self._rows for sequence in plan.admitted):
            self.catch_up()

    def put(self, plan: StepPlan, fenced: list[RefusedRow], schedule: Schedule) -> PendingResult | None:
        """None where the host has to look at what the model computes before tokens are taken.  No row has a grammar."""
        batch, columns, rows = schedule.batch, self._table.columns, schedule.positions.rows
        if schedule.drafts is not None or batch.adapters is not None or len(schedule.scored) or len(schedule.pooled):
            return None
        if np.count_nonzero(columns.raw[rows]) < len(rows):
            return None
        is_plain = np.count_nonzero(columns.plain[rows]) == len(rows)
        step = self._model.queue(batch, None if is_plain else columns.sampled(batch.rows))
        self._last = step
        self._idle.pause()
        self._rows.update(plan.rows)
        self._table.num_computed[batch.rows] = batch.computed + batch.scheduled
        self._table.num_tokens[rows] = schedule.positions.lengths + 1
        sampled = SampledTokens(schedule, None, step.token_ids, None, step)
        outputs = StepOutputs(sampled, None, {}, {}, {}, [], [])
        return PendingResult(partial(make_result, plan, fenced, outputs), partial(self._end, step))

    def _end(self, step: QueuedStep) -> float:
        """Its seconds.  Called in the thread that waits for results."""
        seconds = step.seconds()
        if step is self._last:
            self._idle.go_on()
        return seconds
