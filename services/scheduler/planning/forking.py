"""Siblings in the making of a step: each starts on the prompt that the first of them has computed."""

from __future__ import annotations

from services.scheduler.planning.plan_builder import PlanBuilder
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence, Status


def awaits_sibling(replica: Replica, sequence: Sequence) -> bool:
    """Whether the prompt that this one will share is about to be computed."""
    parent = sequence.parent
    if not _can_share(replica, sequence):
        return False
    return parent.status is Status.WAITING or (parent.status is Status.RUNNING and parent.is_prefilling)


def can_fork(replica: Replica, sequence: Sequence) -> bool:
    """Not where states are kept: its sibling's has seen the whole prompt.  The prefix cache has a snapshot for it."""
    parent = sequence.parent
    if replica.snapshots is not None or not _can_share(replica, sequence):
        return False
    if parent.status is not Status.RUNNING or parent.is_prefilling or sequence.is_protected:
        return False
    num_computed = sequence.request.num_prompt_tokens - 1
    windows = zip(replica.sliding, parent.sliding, strict=True)
    return all(table.first <= one.first_place(num_computed) for one, table in windows)


def _can_share(replica: Replica, sequence: Sequence) -> bool:
    """Whether it has a sibling before it at this worker, and nothing of its own beyond the prompt."""
    parent = sequence.parent
    return parent is not sequence and parent.worker == replica.instance and not sequence.num_output_tokens


def fork(replica: Replica, builder: PlanBuilder, sequence: Sequence) -> int:
    """Give a sequence its sibling's prompt: full blocks are shared, the one to be written in is copied.  Returns how
    many tokens of it are computed.  One block of each pool must be available."""
    num_computed = sequence.request.num_prompt_tokens - 1
    place = replica.share_with(sequence, sequence.parent, num_computed)
    sequence.num_registered_blocks = place
    copy_block(replica, builder, sequence, sequence.parent, place)
    return num_computed


def copy_block(replica: Replica, builder: PlanBuilder, sequence: Sequence, source: Sequence, place: int) -> None:
    """Give a sequence a block of its own behind those that it shares, with what another has at this place.  One of
    each pool must be available."""
    replica.grow(sequence, 1, *(1 for _ in replica.sliding))
    for pool, (theirs, own) in enumerate(zip(source.tables, sequence.tables, strict=True)):
        at = place - theirs.first
        builder.hold(theirs.block_ids[at], pool)
        builder.copy(sequence, theirs.block_ids[at], theirs.generations[at], own.block_ids[-1], pool)
