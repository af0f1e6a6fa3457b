"""Steps of a native decoder that are queued: each has columns of its own until it is computed."""

from __future__ import annotations

from collections import deque

from engine.modeling.batch import StepBatch
from kernels.cpu.binding import abi
from kernels.cpu.binding.native import Native, StepColumns
from kernels.cpu.binding.queued import QueuedStep
from kernels.ops.sampling.sampled_columns import SampledColumns

MOST = 4  # steps on their way: more have no use, and each takes columns for all rows


class StepQueue:
    """Puts steps into the library's queue; the columns of computed ones are used again."""

    def __init__(self, native: Native) -> None:
        self._native = native
        self._used: deque[tuple[StepColumns, int]] = deque()  # with the step's number; the oldest first

    def put(
        self,
        model: abi.PgModel,
        batch: StepBatch,
        sampled: SampledColumns | None,  # of the batch's sequences; None: all take the likeliest token
        owner: object,  # of what the model points at
    ) -> QueuedStep:
        """Waits for the oldest step where there are too many."""
        columns = self._take(batch)
        step = columns.fill(batch.rows, batch.computed, batch.scheduled, batch.wanted, batch.adapters)
        queued = self._native.queue(model, step, batch.num_wanted, sampled, owner, columns)
        self._used.append((columns, queued.number))
        return queued

    def wait(self) -> None:
        """For all steps; from any thread."""
        if self._used:
            self._native.await_step(self._used[-1][1])

    def _take(self, batch: StepBatch) -> StepColumns:
        if len(self._used) == MOST:
            columns, number = self._used.popleft()
            self._native.await_step(number)
            if columns.tokens is batch.tokens and columns.tables is batch.block_tables:
                return columns
        return StepColumns(batch.tokens, batch.block_tables)
