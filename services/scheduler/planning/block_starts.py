"""Reuse of a prefix to the token: a sequence's first block that is not cached whole begins as a copy of another one.

The other one is a cached block, or the last of a sequence that has ended, which was not filled to its end.
"""

from __future__ import annotations

from typing import NamedTuple

from services.scheduler.blocks.contents import BlockContents
from services.scheduler.blocks.sliding import PrefixHit
from services.scheduler.planning.block_budget import BlockBudget
from services.scheduler.planning.plan_builder import PlanBuilder
from services.scheduler.planning.prefixes import Prefixes
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence


class BlockStart(NamedTuple):
    """A cached block that begins with the tokens behind a sequence's hit, and how many of these."""

    block: int
    num_tokens: int


NO_START = BlockStart(-1, 0)


class BlockStarts:
    """Of one worker.  Not where layers have windows or states: these know no token apart from those around it."""

    def __init__(
        self, replica: Replica, builder: PlanBuilder, prefixes: Prefixes, budget: BlockBudget, policy: Policy
    ) -> None:
        self._replica = replica
        self._builder = builder
        self._prefixes = prefixes
        self._budget = budget
        if policy.enable_partial_block_hits and policy.enable_prefix_caching and not replica.has_partial_hits:
            replica.pool.contents = BlockContents(replica.block_size)

    def find(self, sequence: Sequence, hit: PrefixHit) -> BlockStart:
        """The cached block that has most of the tokens behind the hit; of the sequence's tokens one is left to compute,
        for its logits."""
        pool, size, num_hits = self._replica.pool, self._replica.block_size, len(hit.blocks)
        if pool.contents is None or self._prefixes.refusal(sequence) is not None:
            return NO_START
        parent = sequence.hash_blocks(size)[num_hits - 1] if num_hits else sequence.request.root
        wanted = sequence.token_ids[num_hits * size : min((num_hits + 1) * size, sequence.num_tokens - 1)]
        name, num_tokens = pool.contents.longest(parent, wanted)
        return BlockStart(pool.block_of(name), num_tokens) if num_tokens and pool.knows(name) else NO_START

    def hold(self, start: BlockStart, sequence: Sequence, hit: PrefixHit) -> BlockStart:
        """The start, which stays until the step has read it; none where a block is lacking for that."""
        if not start.num_tokens:
            return NO_START
        if self._replica.pool.ref_counts[start.block] == 0:
            (num_lacking,) = self._budget.num_lacking_beside(sequence, hit)
            if num_lacking >= 0:
                return NO_START
        self._builder.hold(start.block)
        return start

    def copy(self, sequence: Sequence, start: BlockStart, place: int) -> int:
        """Fill the sequence's own block at this place.  Returns how many blocks are copied."""
        if not start.num_tokens:
            return 0
        generation = self._replica.pool.generations[start.block]
        self._builder.copy(sequence, start.block, generation, sequence.block_ids[place], 0)
        return 1
