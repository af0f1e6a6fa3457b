"""Preemption: which sequence gives up its row and blocks while a step is being made, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.scheduler.planning.plan_builder import PlanBuilder
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence
from services.scheduler.telemetry.books import Books


class Preemption:
    """Sends running sequences back to the queue; what they had of the step is taken back."""

    def __init__(self, replica: Replica, builder: PlanBuilder, books: Books) -> None:
        self._replica = replica
        self._builder = builder
        self._books = books

    def cheapest(self, candidates: Iterable[Sequence]) -> Sequence | None:
        """The sequence that is the cheapest to recompute, the least urgent of equals; no protected one."""
        return min((sequence for sequence in candidates if not sequence.is_protected), key=self._order, default=None)

    def victim(self, needy: Sequence) -> Sequence:
        """The sequence that gives way to a running one where none rests: a less urgent one, or else that one itself.

        A protected one lacks blocks only of its windows.  It takes those of more urgent ones too: the protected ones
        together have room.
        """
        victim = self.cheapest(other for other in self._replica.running if other.rank > needy.rank)
        if victim is None and needy.is_protected and self._replica.sliding:
            victim = self.cheapest(self._replica.running)
        return victim or needy

    def take_from_resting(self) -> bool:
        """Send back the resting sequence that is the cheapest to recompute, protected or not, for another that lacks a
        row or a block; False where none rests."""
        num_resting = self._replica.num_resting
        if num_resting:
            self.send_back(min(self._replica.running[-num_resting:], key=self._order), "foreground")
        return num_resting > 0

    def take_adapter_from_resting(self) -> bool:
        """Send back the resting sequences of one adapter, which the fewest of them use, for a sequence with another;
        False where there are none but of adapters that active sequences use too."""
        resting = self._replica.running[len(self._replica.active) :]
        active = {sequence.request.adapter for sequence in self._replica.active}
        used = Counter(one.request.adapter for one in resting if one.request.adapter not in {"", *active})
        if not used:
            return False
        rarest = min(used, key=lambda digest: used[digest])
        for sequence in resting:
            if sequence.request.adapter == rarest:
                self.send_back(sequence, "foreground")
        return True

    def num_freed(self, victim: Sequence) -> list[int]:
        """Of each pool, blocks that no other sequence holds, and the one kept for it to grow into."""
        columns = zip(self._replica.pools, victim.tables, strict=True)
        return [1 + sum(1 for block in table.block_ids if pool.ref_counts[block] == 1) for pool, table in columns]

    def preempt(self, victim: Sequence, cause: str) -> None:
        victim.num_preemptions += 1
        self.send_back(victim, cause)

    def send_back(self, victim: Sequence, cause: str) -> None:
        """A preemption that does not count towards the protection of what is sent back."""
        self._books.counters.num_preemptions += 1
        num_computed = victim.num_computed_tokens
        self._books.journal.sequence("sequence_preempted", victim, cause=cause, num_computed_tokens=num_computed)
        self._builder.drop(victim)
        self._replica.preempt(victim)
        self._replica.waiting.add(victim)
        self._books.accounts.preempted(victim)

    def _order(self, sequence: Sequence) -> tuple[int, list[float]]:
        """By the tokens to compute again: blocks that others hold too survive."""
        pool = self._replica.pool
        shared = sum(1 for block in sequence.block_ids if pool.ref_counts[block] > 1)
        cost = sequence.num_computed_tokens - shared * self._replica.block_size
        return cost, [-part for part in sequence.rank]
