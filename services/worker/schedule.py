"""Turns a plan's columns into what one step computes, and for whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.worker.rows import RowTable
from shared.messages.steps import StepPlan
from shared.modeling.batch import Ints, StepBatch
from shared.modeling.sampling_columns import NO_LOGPROBS


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan's columns, one entry per scheduled sequence, and the entries that want something back."""

    rows: Ints  # [num_entries]
    computed: Ints  # [num_entries] tokens before this step
    scheduled: Ints  # [num_entries] tokens of this step
    num_sampled: Ints  # [num_entries] 1 where the last token is the last that the row has
    samples: Ints  # [num_sampled] those entries
    scored: Ints  # [num_scored] entries whose prompt's log-probabilities are asked for, and in this step
    wanted: Ints  # [num_entries] last tokens whose hidden states are needed


def read_schedule(plan: StepPlan, table: RowTable) -> Schedule:
    """The plan's columns, checked against the rows.  Raises FatalError where the two disagree."""
    table.check_rows(plan.rows)
    columns = (plan.rows, plan.num_computed_tokens, plan.num_scheduled_tokens)
    rows, computed, scheduled = (np.array(column, np.int64) for column in columns)
    ends = computed + scheduled
    table.check_schedule(rows, computed, ends)
    num_sampled = (ends == table.num_tokens[rows]).astype(np.int64)
    scored, wanted = _scored(table, rows, computed, ends), num_sampled
    if len(scored):
        wanted = num_sampled.copy()
        wanted[scored] = scheduled[scored]
    return Schedule(rows, computed, scheduled, num_sampled, np.flatnonzero(num_sampled), scored, wanted)


def _scored(table: RowTable, rows: Ints, computed: Ints, ends: Ints) -> Ints:
    """Entries that asked, and compute a token that another one of the prompt follows."""
    columns = table.columns
    asked = columns.prompt_logprobs[rows] != NO_LOGPROBS
    if not asked.any():
        return _NONE
    return np.flatnonzero(asked & (np.minimum(ends, columns.num_prompt[rows] - 1) > computed))


_NONE = np.zeros(0, np.int64)


def make_batch(schedule: Schedule, table: RowTable) -> StepBatch:
    return StepBatch(
        rows=schedule.rows,
        computed=schedule.computed,
        scheduled=schedule.scheduled,
        wanted=schedule.wanted,
        tokens=table.tokens,
        block_tables=table.block_tables,
        block_size=table.block_size,
    )
