"""Sequences that go ahead of other tenants' in a step, and the preemptions that make way for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from services.scheduler.planning.block_budget import BlockBudget
from services.scheduler.planning.preemption import Preemption
from services.scheduler.planning.sharing import Claims
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence


class FairShareAdmission:
    """Waiting sequences that a step starts before it goes on with the prompts that run, in that order.

    Rows and blocks are taken for them before anything of the step is planned: a sequence that gives its row has no part
    in the step.
    """

    def __init__(self, replica: Replica, needs: BlockBudget, preemption: Preemption) -> None:
        self._replica = replica
        self._block_budget = needs
        self._preemption = preemption
        self._chosen: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._chosen)

    def __len__(self) -> int:
        return len(self._chosen)

    def clear(self) -> None:
        """Nothing is chosen for the next step yet."""
        self._chosen.clear()

    def choose(self, claims: Claims, num_tokens: int, may_start: Callable[[Sequence], bool]) -> None:
        """Choose the sequences that go ahead, within so many tokens, and make way for them."""
        for tenant in claims.tenants():
            for sequence in self._replica.waiting.of(tenant):
                if num_tokens <= 0 or not may_start(sequence) or not self._make_way(sequence, claims):
                    break
                claims.grant(tenant)
                self._chosen.append(sequence)
                num_tokens -= sequence.num_tokens

    def _make_way(self, sequence: Sequence, claims: Claims) -> bool:
        """Take the row and the blocks that it lacks from tenants that have more; where that cannot be, take nothing and
        return False."""
        if not (claims.precedes(sequence.tenant) or any(claims.givers(sequence.tenant))):
            return False
        lacking = self._block_budget.num_lacking(sequence, self._chosen)
        while len(self._chosen) >= self._replica.num_free_rows or max(lacking) > 0:
            if not self._preemption.take_from_resting():
                break
            lacking = self._block_budget.num_lacking(sequence, self._chosen)
        num_rows = len(self._chosen) + 1 - self._replica.num_free_rows
        victims: list[Sequence] = []
        while len(victims) < num_rows or self._is_short(lacking, victims):
            victim = self._giving(claims.givers(sequence.tenant), victims)
            if victim is None:
                for other in victims:
                    claims.grant(other.tenant)
                return False
            claims.take(victim.tenant)
            victims.append(victim)
        for victim in victims:
            self._preemption.preempt(victim, "fairness")
        return True

    def _is_short(self, lacking: list[int], victims: list[Sequence]) -> bool:
        """Whether a pool lacks blocks even when these have given up theirs."""
        freed = zip(*map(self._preemption.num_freed, victims), strict=True) if victims else [(0,)] * len(lacking)
        return any(sum(counts) < count for counts, count in zip(freed, lacking, strict=True))

    def _giving(self, givers: Iterable[str], chosen: list[Sequence]) -> Sequence | None:
        """The sequence that is cheapest to recompute, of the first of these tenants that has one to give."""
        for giver in givers:
            candidates = (one for one in self._replica.running if one.tenant == giver and one not in chosen)
            if victim := self._preemption.cheapest(candidates):
                return victim
        return None
