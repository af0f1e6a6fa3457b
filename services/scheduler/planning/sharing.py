"""Which tenant goes ahead at a worker that several tenants use, and which gives way.  It depends on the rows that each
holds now, and on the counters of what each has been served.

Counters alone decide which tenant takes a free row; where one tenant holds all rows with long outputs, no row becomes
free for long.  So a tenant with fewer rows by weight than another goes ahead of it, and takes a row from it where none
is free.  Rows are given by max-min: a move never makes the giver poorer than the taker, so nothing moves back.  A
tenant that asks for no more than its share of the rows gets it at once, if it was not served far more than the others.
A tenant that asks for more gets rows once it has less than half of the other's, since freed rows even out the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from math import fsum

from services.scheduler.state.fairness import Shares, is_background
from services.scheduler.state.replica import Replica

MEMORY = 1024  # steps for which a tenant that left is expected back
NONE_SLOW: frozenset[str] = frozenset()
PATIENCE = 2.0  # a tenant gives a row to one that asks for more than its share if it has so many times as many rows


class Claims:
    """The tenants that go ahead in one step.  Made anew for each step; a granted row counts as held."""

    def __init__(self, replica: Replica, shares: Shares, slack: float) -> None:
        """`slack`: how much more than others, in prompt tokens of weight one, a tenant may have been served that asks
        for no more than its share."""
        self._replica = replica
        self._shares = shares
        self._slack = slack
        self._num_rows = _competing(replica, replica.num_rows)
        self._num_waiting = _competing(replica, replica.waiting.counts())
        active = self._num_rows.keys() | self._num_waiting.keys()
        self._prefilling = {sequence.tenant for sequence in replica.active if sequence.num_behind > 1}
        self._row_value = replica.capacity.max_num_seqs / _whole(shares, active) if active else 0.0

    def tenants(self) -> list[str]:
        """The waiting tenants that may go ahead of another, the least served first."""
        richest = max(map(self._wealth, self._num_rows), default=0.0)
        ahead = [
            tenant
            for tenant in self._num_waiting
            if self.precedes(tenant) or (self._wealth(tenant, 1) < richest and any(self.givers(tenant)))
        ]
        return sorted(ahead, key=self._shares.served)

    def precedes(self, tenant: str) -> bool:
        """Whether prompts of others are being computed, and none of a tenant that was served less."""
        served, others = self._entitlement(tenant), self._prefilling - {tenant}
        return bool(others) and all(self._shares.served(other) >= served for other in others)

    def givers(self, tenant: str) -> Iterator[str]:
        """The tenants with more rows by weight than `tenant` would have with one more, and with no less service; the
        richest first."""
        wealth = self._wealth(tenant, 1) * (1.0 if self._fits(tenant) else PATIENCE)
        served = self._entitlement(tenant)
        for other in sorted(self._num_rows, key=self._wealth, reverse=True):
            if self._wealth(other) <= wealth:
                return
            if other != tenant and self._shares.served(other) >= served:
                yield other

    def grant(self, tenant: str) -> None:
        """A sequence of the tenant gets a row."""
        self._num_rows[tenant] += 1
        self._num_waiting[tenant] -= 1

    def take(self, tenant: str) -> None:
        """A sequence of the tenant gives its row."""
        self._num_rows[tenant] -= 1
        self._num_waiting[tenant] += 1

    def _fits(self, tenant: str) -> bool:
        """Whether all that it asks for is no more than its share of the rows."""
        wanted = self._num_rows[tenant] + self._num_waiting[tenant]
        return wanted <= self._row_value * self._shares.weight(tenant)

    def _entitlement(self, tenant: str) -> float:
        """The least service of another tenant with which `tenant` may go before it."""
        return self._shares.served(tenant) - (self._slack if self._fits(tenant) else 0.0)

    def _wealth(self, tenant: str, more: int = 0) -> float:
        return (self._num_rows[tenant] + more) / self._shares.weight(tenant)


def _competing(replica: Replica, counts: Mapping[str, int]) -> Counter[str]:
    """Of each tenant that can have a part in the next step: those that rest hold rows, and claim none."""
    if not replica.is_resting:
        return Counter(counts)
    return Counter({tenant: count for tenant, count in counts.items() if not is_background(tenant)})


def _whole(shares: Shares, tenants: Set[str]) -> float:
    """Their weights together: the same in every process, though the order of a set is not."""
    return fsum(map(shares.weight, tenants))


class Visitors:
    """The tenants of one worker, with those that left it lately; none of the background, whose steps are short."""

    def __init__(self, replica: Replica, shares: Shares) -> None:
        self._replica = replica
        self._shares = shares
        self._present: list[str] = []  # those that had rows behind the last plan
        self._left: dict[str, int] = {}  # the last step before a tenant left; the one that left first comes first

    def __len__(self) -> int:
        """How many are remembered that left."""
        return len(self._left)

    def planned(self) -> None:
        """A plan is made: these have rows now."""
        self._present = list(self._replica.num_rows)

    def slow(self) -> frozenset[str]:
        """The tenants that ask for more than their share of the rows, while another that does not is here, or was
        lately: their prompts make long the steps for which the other has to wait."""
        replica, shares = self._replica, self._shares
        if self._left or self._present != list(replica.num_rows):
            self._note_leavers()
        if len(replica.num_rows) + len(self._left) < 2 and not replica.waiting:
            return NONE_SLOW
        here = {*self._left, *replica.num_rows, *replica.waiting.tenants}
        if len(here) > 1:
            here = {tenant for tenant in here if not is_background(tenant)}
        if len(here) < 2:
            return NONE_SLOW
        waiting = replica.waiting.counts()
        value = replica.capacity.max_num_seqs / _whole(shares, here)
        slow = frozenset(
            tenant
            for tenant in here
            if replica.num_rows[tenant] + waiting.get(tenant, 0) > max(1.0, value * shares.weight(tenant))
        )
        return slow if len(slow) < len(here) else NONE_SLOW

    def _note_leavers(self) -> None:
        """At most one for each row is remembered, and none for longer than MEMORY."""
        left, num_steps = self._left, self._replica.num_steps
        for tenant in self._present:
            if tenant not in self._replica.num_rows and not is_background(tenant):
                left.pop(tenant, None)
                left[tenant] = num_steps
        self._present = []
        most = self._replica.capacity.max_num_seqs
        while left and (len(left) > most or num_steps - next(iter(left.values())) > MEMORY):
            del left[next(iter(left))]
