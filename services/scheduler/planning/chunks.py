"""How many of its tokens a sequence computes in one step."""

from __future__ import annotations

from services.scheduler.planning.checkpoints import Checkpoints
from services.scheduler.planning.plan_builder import PlanBuilder
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence


class ChunkSizes:
    """Of the steps of one worker, within what the step under way can still take.

    Invariant: between two plans (`clear`) it holds nothing of a step but which tenants were slow.
    """

    def __init__(self, replica: Replica, builder: PlanBuilder, checkpoints: Checkpoints, policy: Policy) -> None:
        self.slow: frozenset[str] = frozenset()  # tenants whose prompts come in small pieces
        self._builder = builder
        self._checkpoints = checkpoints
        self._policy = policy
        self._longest = replica.longest_chunk
        self._max_slow_tokens = policy.fair_prefill_tokens or policy.max_num_batched_tokens
        self._slow_budget = self._max_slow_tokens  # of the prompts of all slow tenants in this step

    def clear(self) -> None:
        self._slow_budget = self._max_slow_tokens

    def size(self, sequence: Sequence, num_computed: int, num_behind: int) -> int:
        """Of the tokens behind those that are computed; 0: none in this step.  With states it ends where a snapshot is
        taken."""
        num_tokens = self._within_budget(sequence, num_behind)
        if num_tokens < 2 or not self._policy.enable_chunked_prefill:
            return num_tokens
        return self._checkpoints.cut(sequence, num_computed, num_tokens)

    def _within_budget(self, sequence: Sequence, num_behind: int) -> int:
        threshold = self._policy.long_prefill_token_threshold
        num_tokens = min(num_behind, self._builder.budget)
        if not self._may_cut(sequence):
            return min(num_tokens, self._longest) if num_tokens == num_behind else 0
        if sequence.tenant in self.slow and num_behind > 1:
            num_tokens = min(num_tokens, self._slow_budget)
            self._slow_budget -= num_tokens
        if threshold and num_behind > 1:
            num_tokens = min(num_tokens, threshold)
        return min(num_tokens, self._longest)

    def _may_cut(self, sequence: Sequence) -> bool:
        """Whether it may be computed in pieces.  One that has outgrown a step has to be: after a preemption, or the
        loss of its worker, it would wait for ever, and those behind it too."""
        return self._policy.enable_chunked_prefill or sequence.num_tokens > self._policy.max_num_batched_tokens
