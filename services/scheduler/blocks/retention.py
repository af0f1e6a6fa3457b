"""Blocks whose requests asked that they be kept: they are given out last, as long as their tenant's share allows it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from services.scheduler.blocks.clock import Clock


class Retention(NamedTuple):
    tenant: str
    seconds: float


class RetainedBlocks:
    """Blocks that no sequence holds, by tenant, the oldest first.

    A tenant retains at most its share of the pool among the tenants that retain something.  Invariant: `_owners` has
    exactly the blocks of `_by_tenant`.
    """

    def __init__(self, size: int, clock: Clock, weight: Callable[[str], float]) -> None:
        """`size`: blocks of the pool; `weight`: of a tenant."""
        self._size = size
        self._clock = clock
        self._weight = weight
        self._owners: dict[int, tuple[str, float]] = {}  # and until when, in order of release
        self._by_tenant: dict[str, dict[int, None]] = {}
        self._ends: list[tuple[float, int]] = []  # a heap; entries of blocks that were taken meanwhile stay in it

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[int]:
        return iter(self._owners)

    def __contains__(self, block: object) -> bool:
        return block in self._owners

    def add(self, blocks: Sequence[int], retention: Retention) -> list[int]:
        """Retain free blocks; returns those that are retained no longer, the oldest first."""
        if not blocks:  # a tenant without any takes no share
            return []
        tenant, end = retention.tenant, self._clock.now + retention.seconds
        mine = self._by_tenant.setdefault(tenant, {})
        for block in blocks:
            self._owners[block] = (tenant, end)
            mine[block] = None
            heapq.heappush(self._ends, (end, block))
        if len(self._ends) > 4 * self._size:
            self._ends = sorted((until, block) for block, (_, until) in self._owners.items())
        return [*self.expire(), *self._beyond_shares()]

    def remove(self, block: int) -> None:
        tenant, _ = self._owners.pop(block)
        mine = self._by_tenant[tenant]
        del mine[block]
        if not mine:
            del self._by_tenant[tenant]

    def take(self, count: int) -> list[int]:
        """The oldest ones, of which there must be that many."""
        found = [block for block, _ in zip(self._owners, range(count), strict=False)]
        for block in found:
            self.remove(block)
        return found

    def expire(self) -> list[int]:
        """Those whose time is over, which are retained no longer."""
        found = []
        while self._ends and self._ends[0][0] <= self._clock.now:
            end, block = heapq.heappop(self._ends)
            if self._owners.get(block, ("", 0.0))[1] == end:
                self.remove(block)
                found.append(block)
        return found

    def clear(self) -> None:
        self._owners.clear()
        self._by_tenant.clear()
        self._ends.clear()

    def _beyond_shares(self) -> list[int]:
        whole = sum(map(self._weight, self._by_tenant))
        found = []
        for tenant, mine in list(self._by_tenant.items()):
            most = int(self._size * self._weight(tenant) / whole)
            oldest = [block for block, _ in zip(mine, range(len(mine) - most), strict=False)]
            for block in oldest:
                self.remove(block)
            found += oldest
        return found
