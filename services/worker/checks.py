"""Checks of a plan by itself, before anything of it is done.

The rows check whether the plan agrees with them, each for itself: an entry that does not is refused.  A plan that fails
here has not come from a scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import ProtocolError
from shared.messages import StepPlan, WorkerCapacity

COLUMNS = ("num_computed_tokens", "num_scheduled_tokens", "num_new_blocks")


def check_plan(plan: StepPlan, capacity: WorkerCapacity) -> None:
    """Raise ProtocolError unless the columns fit together and name rows and blocks that there are."""
    count = len(plan.rows)
    for name in COLUMNS:
        column: list[int] = getattr(plan, name)
        if len(column) != count or min(column, default=0) < 0:
            raise ProtocolError(f"a plan has no {name} for each of its {count} rows")
    _check_within("row", plan.rows, capacity.max_num_seqs)
    _check_within("row", plan.released_rows, capacity.max_num_seqs)
    _check_within("row", [sequence.row for sequence in plan.admitted], capacity.max_num_seqs)
    _check_within("block", plan.new_block_ids, capacity.num_blocks)
    _check_within("block", [block for pair in plan.block_copies for block in pair], capacity.num_blocks)
    if len(plan.new_block_generations) != len(plan.new_block_ids):
        raise ProtocolError(f"a plan has {len(plan.new_block_generations)} generations for its new blocks")
    if len(plan.copy_generations) != len(plan.block_copies):
        raise ProtocolError(f"a plan has {len(plan.copy_generations)} generations for its block copies")
    if len(set(plan.rows)) != count:
        raise ProtocolError("a plan names a row twice")
    if sum(plan.num_new_blocks) != len(plan.new_block_ids):
        raise ProtocolError(f"a plan has {len(plan.new_block_ids)} block ids for {sum(plan.num_new_blocks)}")
    if any(len(sequence.token_ids) % 4 for sequence in plan.admitted):
        raise ProtocolError("a plan admits a sequence whose token ids are not whole int32")


def _check_within(what: str, values: Sequence[int], size: int) -> None:
    if values and (min(values) < 0 or max(values) >= size):
        raise ProtocolError(f"a plan names a {what} outside {size}")
