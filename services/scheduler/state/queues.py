"""The waiting queue of one worker, and its order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Set
from heapq import heapify, heappop, heapreplace

from services.scheduler.state.fairness import Shares, is_background
from services.scheduler.state.sequence import Rank, Sequence

Key = tuple[bool, bool, float, Rank]


def by_rank(sequence: Sequence) -> Rank:
    return sequence.rank


class WaitingQueue:
    """Sequences that hold nothing.

    Those of one tenant wait in the order of their rank, so that one that was preempted finds its old place again.
    Among tenants, sequences that have run before come first, since their prompts are charged already; then those of the
    tenant that was served least.  Background sequences come behind all others.
    """

    def __init__(self, shares: Shares) -> None:
        self.num_tokens = 0  # as they were when they came; one that was preempted may still get one or two
        self.num_background = 0  # sequences
        self.num_background_tokens = 0  # of `num_tokens`
        self._shares = shares
        self._by_tenant: dict[str, list[Sequence]] = {}
        self._sizes: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Sequence]:
        """The next first.  The queue may change meanwhile; what was charged meanwhile counts at once."""
        if len(self._by_tenant) == 1:
            return iter(tuple(next(iter(self._by_tenant.values()))))
        return self._merged()

    def _merged(self) -> Iterator[Sequence]:
        queues = {tenant: iter(tuple(queue)) for tenant, queue in self._by_tenant.items()}
        firsts = {tenant: next(queue) for tenant, queue in queues.items()}
        heads = [(self._key(first), tenant) for tenant, first in firsts.items()]
        heapify(heads)
        while heads:
            tenant = heads[0][1]
            yield firsts[tenant]
            following = next(queues[tenant], None)
            if following is None:
                heappop(heads)
            else:
                firsts[tenant] = following
                heapreplace(heads, (self._key(following), tenant))

    def _key(self, sequence: Sequence) -> Key:
        has_never_run = sequence.num_cached_tokens < 0
        return sequence.is_background, has_never_run, self._shares.served(sequence.tenant), sequence.rank

    @property
    def tenants(self) -> Set[str]:
        return self._by_tenant.keys()

    def counts(self) -> dict[str, int]:
        """How many sequences of each tenant wait."""
        return {tenant: len(queue) for tenant, queue in self._by_tenant.items()}

    def of(self, tenant: str) -> Iterator[Sequence]:
        """One tenant's, the next first.  The queue may change meanwhile."""
        return iter(tuple(self._by_tenant.get(tenant, ())))

    @property
    def firsts(self) -> list[Sequence]:
        """Of each tenant the one that comes next."""
        return [queue[0] for queue in self._by_tenant.values()]

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        if tenant not in self._by_tenant:
            alike = (other for other in self._by_tenant if is_background(other) == sequence.is_background)
            self._shares.lift(tenant, alike)
        insort(self._by_tenant.setdefault(tenant, []), sequence, key=by_rank)
        self._sizes[sequence] = sequence.num_tokens
        self.num_tokens += sequence.num_tokens
        if sequence.is_background:
            self.num_background += 1
            self.num_background_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        num_tokens = self._sizes.pop(sequence)
        self.num_tokens -= num_tokens
        if sequence.is_background:
            self.num_background -= 1
            self.num_background_tokens -= num_tokens
        queue = self._by_tenant[tenant]
        del queue[bisect_left(queue, sequence.rank, key=by_rank)]
        if not queue:
            del self._by_tenant[tenant]

    def take_all(self) -> list[Sequence]:
        taken = [sequence for queue in self._by_tenant.values() for sequence in queue]
        self._by_tenant.clear()
        self._sizes.clear()
        self.num_tokens = self.num_background = self.num_background_tokens = 0
        return taken
