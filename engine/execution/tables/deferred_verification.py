"""Rows whose number of tokens the host does not know, because a step that verifies their drafts is under way.

The scheduler cannot plan such a row again before it has the step's result.  So by the time that a plan names the row,
the result has been read and sent, and `settle` does not wait.  A plan made without the result would wait for the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.execution.outputs.sampled_tokens import SampledTokens
from engine.execution.tables.rows import RowTable
from engine.modeling.batch import Ints

NO_STEP = -1


class DeferredVerification:
    """Invariant: a row is either settled, or in one step that is kept here."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._steps: dict[int, SampledTokens] = {}
        self._next = 0
        self._step: Ints = np.full(table.num_rows, NO_STEP)  # that verifies the row's drafts
        self._sample: Ints = np.zeros(table.num_rows, np.int64)  # its place there
        self._count: Ints = np.zeros(table.num_rows, np.int64)  # drafts that are computed there

    def defer(
        self,
        rows: Ints,  # [n], distinct
        samples: Ints,  # [n] their places in the step
        counts: Ints,  # [n] their drafts, at least one each
        sampled: SampledTokens,
    ) -> None:
        if not len(rows):
            return
        self._steps[self._next] = sampled
        self._step[rows], self._sample[rows], self._count[rows] = self._next, samples, counts
        self._next += 1

    def settle(self, rows: Sequence[int]) -> None:
        """Write the outcome of these rows into the table."""
        if not self._steps:
            return
        named = np.array(rows, np.int64)
        named = named[(named >= 0) & (named < len(self._step))]  # a plan's rows are checked later
        for step in set(self._step[named].tolist()) - {NO_STEP}:
            due = named[self._step[named] == step]
            accepted = self._steps[step].yielded.accepted
            assert accepted is not None
            self._table.keep_verified(due, self._count[due], accepted[self._sample[due]])
            self._forget(due)

    def drop(self, rows: Sequence[int]) -> None:
        """Forget these rows: they are released or admitted anew."""
        if self._steps:
            self._forget(np.array(rows, np.int64))

    def clear(self) -> None:
        self._steps.clear()
        self._step[:] = NO_STEP

    def _forget(self, rows: Ints) -> None:
        self._step[rows] = NO_STEP
        left = set(self._step.tolist())
        self._steps = {step: sampled for step, sampled in self._steps.items() if step in left}
