"""What the torch decoder computes with: one entry per token, made from a batch's columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.modeling.batch import Ints, StepBatch
from kernels.interface import Kernels
from kernels.ops.attention.attention import AttentionMetadata
from kernels.ops.linears.lora import NO_ADAPTER
from kernels.ops.states.state_plan import StatePlan
from kernels.ops.steps.transfer import to_device


@dataclass(frozen=True, slots=True)
class PoolInputs:
    """Where a step's keys and values are, of the layers of one KV pool."""

    slot_mapping: Tensor  # [num_tokens without padding] int64
    attention: AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens, padded to the provider's row multiple."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    pools: Sequence[PoolInputs]  # of the layers of each KV pool
    wanted: Tensor  # [sum of wanted] int64 places of the tokens whose hidden states are returned
    states: StatePlan | None = None  # of models whose layers keep states
    adapters: Tensor | None = None  # [num_tokens] int64 places of held adapters, or -1


def build_inputs(
    batch: StepBatch, kernels: Kernels, windows: Sequence[tuple[int, ...]], *, has_states: bool = False
) -> StepInputs:
    """`windows`: the distinct ones of the layers of each KV pool.

    Token ids are gathered on the device, where the newest of them may only just have been sampled.
    """
    device, size = batch.tokens.device, batch.block_size
    entries = np.repeat(np.arange(len(batch.rows)), batch.scheduled)  # [num_tokens]
    ends = np.cumsum(batch.scheduled)
    starts = ends - batch.scheduled
    positions = np.arange(len(entries)) - (starts - batch.computed)[entries]
    rows = batch.rows[entries]
    padding = -len(entries) % kernels.row_multiple
    where = to_device(np.pad(np.stack((rows, positions)), ((0, 0), (0, padding)), mode="edge"), device)
    pools = []
    for tables, seen in zip(np.split(batch.block_tables, len(windows), axis=1), windows, strict=True):
        slots = tables[rows, positions // size] * size + positions % size
        pools.append(PoolInputs(to_device(slots, device), _plan_attention(batch, tables, kernels, seen)))
    return StepInputs(
        token_ids=batch.tokens[where[0], where[1]],
        positions=where[1],
        pools=pools,
        wanted=to_device(batch.wanted_places(), device),
        states=_plan_states(batch) if has_states else None,
        adapters=None if batch.adapters is None else _adapters(batch, entries, padding),
    )


def _adapters(batch: StepBatch, entries: Ints, padding: int) -> Tensor:
    assert batch.adapters is not None
    padded = np.pad(batch.adapters[entries], (0, padding), constant_values=NO_ADAPTER)
    return to_device(padded, batch.tokens.device)


def _plan_states(batch: StepBatch) -> StatePlan:
    """A row's states lie at its number."""
    starts = np.concatenate(([0], np.cumsum(batch.scheduled)))
    return StatePlan(*(to_device(column, batch.tokens.device) for column in (batch.rows, starts, batch.computed)))


def _plan_attention(
    batch: StepBatch,
    block_tables: Ints,  # [num_rows, max_num_blocks]
    kernels: Kernels,
    windows: tuple[int, ...],
) -> AttentionMetadata:
    seq_lens = batch.computed + batch.scheduled
    width = -(-int(seq_lens.max()) // batch.block_size)
    tables = to_device(block_tables[batch.rows, :width], batch.tokens.device)
    return kernels.plan_attention(batch.scheduled.tolist(), seq_lens.tolist(), tables, batch.block_size, windows)
