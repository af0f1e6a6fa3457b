"""Turns a plan's columns into what one step computes, and for whom."""

from __future__ import annotations

import msgspec
import numpy as np

from shared.execution.rows import RowTable
from shared.messages.steps import StepPlan
from shared.modeling.batch import Ints, StepBatch


class Schedule(msgspec.Struct, frozen=True):
    """What the model computes, and the entries that want something back."""

    batch: StepBatch
    num_sampled: Ints  # [num_entries] 1 where the last token is the last that the row has
    samples: Ints  # [num_sampled] those entries
    scored: Ints  # [num_scored] entries whose prompt's log-probabilities are asked for, and in this step


def read_schedule(plan: StepPlan, table: RowTable) -> Schedule:
    """The plan's columns, checked against the rows.  Raises FatalError where the two disagree."""
    table.check_rows(plan.rows)
    rows = np.array(plan.rows, np.int64)
    computed = np.array(plan.num_computed_tokens, np.int64)
    scheduled = np.array(plan.num_scheduled_tokens, np.int64)
    ends = computed + scheduled
    lengths = table.check_schedule(rows, computed, ends)
    num_sampled = (ends == lengths).astype(np.int64)
    scored, wanted = _scored(table, rows, computed, ends), num_sampled
    if len(scored):
        wanted = num_sampled.copy()
        wanted[scored] = scheduled[scored]
    batch = StepBatch(rows, computed, scheduled, wanted, table.tokens, table.block_tables, table.block_size)
    return Schedule(batch, num_sampled, num_sampled.nonzero()[0], scored)


def _scored(table: RowTable, rows: Ints, computed: Ints, ends: Ints) -> Ints:
    """Entries that asked, and compute a token that another one of the prompt follows."""
    columns = table.columns
    asked = columns.scores_prompt[rows]
    if not np.count_nonzero(asked):
        return _NONE
    return np.flatnonzero(asked & (np.minimum(ends, columns.num_prompt[rows] - 1) > computed))


_NONE = np.zeros(0, np.int64)
