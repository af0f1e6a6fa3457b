"""Checks of a plan by itself, before anything of it is done.

The rows check whether the plan agrees with them, each for itself: an entry that does not is refused.  A plan that fails
here has not come from a scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.blocks.block_desk import MoveOrder
from shared.data_link.frames import MAX_BLOCKS, NAME_BYTES
from shared.errors import ProtocolError
from shared.messages import SlidingPlan, StepPlan, WorkerCapacity

SLIDING_COLUMNS = ("num_left_blocks", "num_new_blocks")
COLUMNS = ("num_computed_tokens", "num_scheduled_tokens", "num_new_blocks")


def check_plan(plan: StepPlan, capacity: WorkerCapacity) -> None:
    """Raise ProtocolError unless the columns fit together and name rows and blocks that there are."""
    count = len(plan.rows)
    for name in COLUMNS:
        _check_column(plan, name, count)
    _check_within("row", plan.rows, capacity.max_num_seqs)
    _check_within("row", plan.released_rows, capacity.max_num_seqs)
    _check_within("row", [sequence.row for sequence in plan.admitted], capacity.max_num_seqs)
    _check_blocks(plan, capacity.num_blocks)
    if plan.sliding and len(plan.sliding) != len(capacity.sliding):
        raise ProtocolError(f"a plan has {len(plan.sliding)} sliding pools, the worker {len(capacity.sliding)}")
    for part, pool in zip(plan.sliding, capacity.sliding, strict=False):
        for name in SLIDING_COLUMNS:
            _check_column(part, name, count)
        _check_blocks(part, pool.num_blocks)
    _check_states(plan, capacity)
    if len(set(plan.rows)) != count:
        raise ProtocolError("a plan names a row twice")
    if any(len(sequence.token_ids) % 4 for sequence in plan.admitted):
        raise ProtocolError("a plan admits a sequence whose token ids are not whole int32")


def check_move(order: MoveOrder, capacity: WorkerCapacity) -> None:
    """Raise ProtocolError unless it names so many blocks that there are, each once."""
    count = len(order.names)
    if not 0 < count <= MAX_BLOCKS or any(len(name) != NAME_BYTES for name in order.names):
        raise ProtocolError(f"a move of {count} blocks, or of one without a name")
    if len(order.blocks) != count or len(order.generations) != count or len(set(order.blocks)) != count:
        raise ProtocolError(f"a move has {count} names, but not as many distinct blocks and generations")
    _check_within("block", order.blocks, capacity.num_blocks)
    if not capacity.block_space:
        raise ProtocolError("a move of blocks at a worker that announces none")


def _check_states(plan: StepPlan, capacity: WorkerCapacity) -> None:
    num_rows = capacity.max_num_seqs if capacity.keeps_states else 0
    _check_within("row of states", [row for pair in plan.state_forks for row in pair], num_rows)
    for moves in (plan.state_loads, plan.state_saves):
        _check_within("row of states", [row for row, _, _ in moves], num_rows)
        _check_within("snapshot", [snapshot for _, snapshot, _ in moves], capacity.num_snapshots)
    targets = (
        [row for row, _ in plan.state_forks] + [row for row, _, _ in plan.state_loads],
        [snapshot for _, snapshot, _ in plan.state_saves],
    )
    if any(len(set(one)) != len(one) for one in targets):
        raise ProtocolError("a plan names the place of a state twice")


def _check_column(part: StepPlan | SlidingPlan, name: str, count: int) -> None:
    column: list[int] = getattr(part, name)
    if len(column) != count or min(column, default=0) < 0:
        raise ProtocolError(f"a plan has no {name} for each of its {count} rows")


def _check_blocks(part: StepPlan | SlidingPlan, num_blocks: int) -> None:
    _check_within("block", part.new_block_ids, num_blocks)
    _check_within("block", [block for pair in part.block_copies for block in pair], num_blocks)
    if len(part.new_block_generations) != len(part.new_block_ids):
        raise ProtocolError(f"a plan has {len(part.new_block_generations)} generations for its new blocks")
    if len(part.copy_generations) != len(part.block_copies):
        raise ProtocolError(f"a plan has {len(part.copy_generations)} generations for its block copies")
    if sum(part.num_new_blocks) != len(part.new_block_ids):
        raise ProtocolError(f"a plan has {len(part.new_block_ids)} block ids for {sum(part.num_new_blocks)}")


def _check_within(what: str, values: Sequence[int], size: int) -> None:
    if values and (min(values) < 0 or max(values) >= size):
        raise ProtocolError(f"a plan names a {what} outside {size}")
