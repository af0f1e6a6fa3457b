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
    parent = sequence.parent
    if not _can_share(replica, sequence):
        return False
    return parent.status is Status.RUNNING and not parent.is_prefilling and not sequence.is_protected


def _can_share(replica: Replica, sequence: Sequence) -> bool:
    """Whether it has a sibling before it at this worker, and nothing of its own beyond the prompt."""
    parent = sequence.parent
    return parent is not sequence and parent.worker == replica.instance and not sequence.num_output_tokens


def fork(replica: Replica, builder: PlanBuilder, sequence: Sequence) -> int:
    """Give a sequence its sibling's prompt: full blocks are shared, the one to be written in is copied.  Returns how
    many tokens of it are computed.  One block must be available."""
    parent = sequence.parent
    num_computed = sequence.request.num_prompt_tokens - 1
    num_shared = num_computed // replica.block_size
    replica.share(sequence, parent.block_ids[:num_shared], parent.block_generations[:num_shared])
    (own,) = replica.grow(sequence, 1)
    sequence.num_registered_blocks = num_shared
    builder.copy(sequence, parent.block_ids[num_shared], parent.block_generations[num_shared], own)
    return num_computed
