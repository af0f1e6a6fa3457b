"""Turns a plan's columns into the batch of one step, and the entries that get results."""

from __future__ import annotations

import msgspec
import numpy as np

from engine.execution.drafts import read_counts, read_drafts
from engine.execution.tables.rows import RowTable
from engine.modeling.batch import Ints, StepBatch
from engine.sampling.drafts import Drafts
from engine.sampling.processing import SampleBatch
from shared.messages.steps import StepPlan


class Schedule(msgspec.Struct, frozen=True):
    """What the model computes, and the entries that get results."""

    batch: StepBatch
    num_positions: Ints  # [num_entries] 1 where the last token is the last that the row has, or 1 + its drafts
    samples: Ints  # [num_samples] those entries
    positions: SampleBatch  # theirs, one after the other
    scored: Ints  # [num_scored] entries whose prompt's log-probabilities are asked for, and in this step
    pooled: Ints  # [num_pooled] entries whose hidden states make an embedding
    drafts: Drafts | None  # of the entries that sample

    def sampled_places(self) -> Ints:
        """Of the sampled positions, among the hidden states that come back."""
        counts = self.num_positions[self.samples]
        ends = np.cumsum(self.batch.wanted)[self.samples]
        return np.repeat(ends - np.cumsum(counts), counts) + np.arange(len(self.positions.rows))


def read_schedule(plan: StepPlan, table: RowTable) -> Schedule:
    """The plan's columns, checked against the rows; draft tokens are put behind the rows' own.

    Raises FatalError where plan and rows disagree.
    """
    table.check_rows(plan.rows)
    rows = np.array(plan.rows, np.int64)
    computed = np.array(plan.num_computed_tokens, np.int64)
    scheduled = np.array(plan.num_scheduled_tokens, np.int64)
    if (excess := table.excess(rows, computed)) is not None:
        computed -= excess
    ends, counts = computed + scheduled, read_counts(plan)
    lengths = table.check_schedule(rows, computed, ends, counts)
    num_positions = (ends == lengths).astype(np.int64) if counts is None else (ends == lengths + counts) * (counts + 1)
    scored, pooled, wanted = _scored(table, rows, computed, ends), table.columns.pools[rows].nonzero()[0], num_positions
    if len(scored) or len(pooled):
        wanted = num_positions.copy()
        for whole in (scored, pooled[table.columns.pools_all[rows[pooled]]]):
            wanted[whole] = scheduled[whole]
    tables = table.tokens, table.block_tables, table.block_size
    batch = StepBatch(rows, computed, scheduled, wanted, *tables, table.adapters(rows))
    samples = num_positions.nonzero()[0]
    positions = SampleBatch(rows[samples], lengths[samples], table.tokens, table.columns)
    drafts = None if counts is None else read_drafts(plan, counts[samples], table.vocab_size)
    if drafts is not None:
        positions = _spread(positions, drafts)
        table.write_drafts(positions.rows[drafts.places], positions.lengths[drafts.places], drafts.token_ids)
    return Schedule(batch, num_positions, samples, positions, scored, pooled, drafts)


def _spread(positions: SampleBatch, drafts: Drafts) -> SampleBatch:
    """From one position of each sequence to one for each draft token and what follows all."""
    counts = drafts.counts + 1
    lengths = (positions.lengths - drafts.starts).repeat(counts) + np.arange(drafts.num_positions)
    return SampleBatch(positions.rows.repeat(counts), lengths, positions.tokens, positions.columns)


def _scored(table: RowTable, rows: Ints, computed: Ints, ends: Ints) -> Ints:
    """Entries that asked, and compute a token that another one of the prompt follows."""
    columns = table.columns
    asked = columns.scores_prompt[rows]
    if not np.count_nonzero(asked):
        return _NONE
    return np.flatnonzero(asked & (np.minimum(ends, columns.num_prompt[rows] - 1) > computed))


_NONE = np.zeros(0, np.int64)
