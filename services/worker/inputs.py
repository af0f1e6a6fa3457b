"""Turns a plan's columns and the row table into one step's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.worker.rows import Ints, RowTable
from shared.messages.steps import StepPlan
from shared.modeling.llama import Decoder, StepInputs


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan's columns, one entry per scheduled sequence."""

    rows: Ints  # [num_entries]
    computed: Ints  # [num_entries] tokens before this step
    scheduled: Ints  # [num_entries] tokens of this step
    starts: Ints  # [num_entries] places of first tokens in the step
    samples: Ints  # [num_sampled] entries whose last token is the last that the row has


def read_schedule(plan: StepPlan, table: RowTable) -> Schedule:
    """The plan's columns, checked against the rows.  Raises FatalError where the two disagree."""
    columns = (plan.rows, plan.num_computed_tokens, plan.num_scheduled_tokens)
    rows, computed, scheduled = (np.asarray(column, dtype=np.int64) for column in columns)
    table.check_schedule(rows, computed, scheduled)
    starts = np.cumsum(scheduled) - scheduled
    samples = np.flatnonzero(computed + scheduled == table.num_tokens[rows])
    return Schedule(rows, computed, scheduled, starts, samples)


def build_inputs(schedule: Schedule, table: RowTable, model: Decoder) -> StepInputs:
    """Token ids are gathered on the device, where the newest of them may only just have been sampled."""
    entries = np.repeat(np.arange(len(schedule.rows)), schedule.scheduled)  # [num_tokens]
    positions = np.arange(len(entries)) - (schedule.starts - schedule.computed)[entries]
    rows = schedule.rows[entries]
    size = table.block_size
    slots = table.block_tables[rows, positions // size] * size + positions % size
    padding = -len(entries) % model.kernels.row_multiple
    where = torch.from_numpy(np.pad(np.stack((rows, positions)), ((0, 0), (0, padding)), mode="edge")).to(model.device)
    seq_lens = schedule.computed + schedule.scheduled
    width = -(-int(seq_lens.max()) // size)
    attention = model.kernels.plan_attention(
        schedule.scheduled.tolist(),
        seq_lens.tolist(),
        torch.from_numpy(table.block_tables[schedule.rows, :width]).to(model.device),
        size,
        model.windows,
    )
    return StepInputs(
        token_ids=table.tokens[where[0], where[1]],
        positions=where[1],
        slot_mapping=torch.from_numpy(slots).to(model.device),
        attention=attention,
    )
