"""Counters of the service that each tenant has had: tenants share the workers by weight.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024): each tenant's counter grows
with the tokens computed for it, divided by its weight; of those that wait the one with the least comes first.  A tenant
that comes back is lifted to the least of those that waited meanwhile: having been away earns nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from shared.errors import ConfigError

MAX_TENANTS = 4096  # with a counter that is kept, beside the tenants that have requests
BACKGROUND = "\0background/"  # before the tenant's name, which never begins so
OUTPUT_COST = 2.0  # of a generated token, in prompt tokens: what the paper charges


def share_of(tenant: str, *, is_background: bool) -> str:
    """The name under which a tenant's requests share the workers.

    What is computed in the background takes nothing from others, so it is no debt of the tenant: it shares under a name
    of its own with the background requests of other tenants.
    """
    return BACKGROUND + tenant if is_background else tenant


def is_background(share: str) -> bool:
    return share.startswith(BACKGROUND)


class Shares:
    """The counters of all tenants."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = {**weights, **{BACKGROUND + tenant: weight for tenant, weight in weights.items()}}
        self._served: dict[str, float] = {}

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """In prompt tokens of weight one."""
        return self._served.get(tenant, 0.0)

    @property
    def num_tenants(self) -> int:
        """Tenants with a counter."""
        return len(self._served)

    def forget_absent(self, present: Collection[str]) -> None:
        """Keep the counters of the present tenants, and of half of MAX_TENANTS others: those that were served most.

        A forgotten tenant comes back like a new one, and is lifted like any that has been away.  Only its having been
        served more than those that wait would count then; of those that are forgotten it counts least.
        """
        absent = sorted((tenant for tenant in self._served if tenant not in present), key=self._served.__getitem__)
        for tenant in absent[: max(0, len(absent) - MAX_TENANTS // 2)]:
            del self._served[tenant]

    def charge_prompt(self, tenant: str, num_tokens: int) -> None:
        cost = num_tokens / self._weights.get(tenant, 1.0)
        self._served[tenant] = self._served.get(tenant, 0.0) + cost

    def charge_output(self, tenant: str, num_tokens: int) -> None:
        cost = OUTPUT_COST * num_tokens / self._weights.get(tenant, 1.0)  # for each token: no further calls
        self._served[tenant] = self._served.get(tenant, 0.0) + cost

    def lift(self, tenant: str, others: Iterable[str]) -> None:
        """A tenant begins to wait beside others that do."""
        least = min((self.served(other) for other in others), default=0.0)
        if least > self.served(tenant):
            self._served[tenant] = least


def parse_weights(text: str) -> dict[str, float]:
    """`"acme=2,beta=0.5"` -> weights by tenant.  Raises ConfigError where it is none."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        tenant, _, value = part.partition("=")
        try:
            weights[tenant.strip()] = float(value)
        except ValueError as error:
            raise ConfigError(f"tenant_weights: {part!r} is not TENANT=WEIGHT") from error
        if not 0 < weights[tenant.strip()] < float("inf"):
            raise ConfigError(f"tenant_weights: the weight of {tenant.strip()!r} must be greater than zero")
    return weights
