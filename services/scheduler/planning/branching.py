"""Beams in the making of a step: they fork in running order, and idle ones give way."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.planning.forking import copy_block
from services.scheduler.planning.plan_builder import PlanBuilder
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence, Status


def is_idle(sequence: Sequence) -> bool:
    """Whether it is a beam whose candidates are known, and that waits for those of the others."""
    search = sequence.request.search
    return search is not None and search.has_answer(sequence.index)


def branch_off(
    replica: Replica, builder: PlanBuilder, branches: Iterable[tuple[Sequence, Sequence]], reserve: int
) -> int:
    """Start beams where others stand; returns how many blocks are copied.  A beam for which there is no row or block
    waits as other sequences do, and computes again what the prefix cache does not have.

    Before anything else of a step: then those others stand where they stood when the search went on.
    """
    num_copies = len(builder.copies)
    for sequence, source in branches:
        if sequence.status is Status.WAITING and source.status is Status.RUNNING and not sequence.num_in_flight:
            _branch(replica, builder, sequence, source, reserve)
    return len(builder.copies) - num_copies


def _branch(replica: Replica, builder: PlanBuilder, sequence: Sequence, source: Sequence, reserve: int) -> None:
    """Full blocks are shared, the one to be written in is copied."""
    num_over = source.num_computed_tokens % replica.block_size
    if not replica.num_free_rows or any(pool.num_available - reserve < (num_over > 0) for pool in replica.pools):
        return
    place = replica.share_with(sequence, source, source.num_computed_tokens)
    if num_over:
        copy_block(replica, builder, sequence, source, place)
    replica.start(sequence)
    sequence.num_registered_blocks = source.num_registered_blocks
    sequence.num_computed_tokens = source.num_computed_tokens
    sequence.status = Status.RUNNING
    builder.unsent.add(sequence)
    builder.fork_state(sequence, source)


def idle_beams(replica: Replica) -> list[Sequence]:
    """Beams that can give up row and blocks at no cost before their search goes on; the least urgent first."""
    return [sequence for sequence in reversed(replica.running) if is_idle(sequence)]
