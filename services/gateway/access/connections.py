"""How many clients may be connected to one front of a gateway, in all and from each address.  No I/O."""

from __future__ import annotations

import ipaddress
from collections import Counter

from shared.config import GatewaySettings
from shared.processes import descriptors

RESERVED = 128  # descriptors of a gateway for all but its clients: the bus, files, libraries
NUM_FRONTS = 2  # gRPC and HTTP
FEWEST = 8


class Connections:
    """The connections that are open now."""

    def __init__(self, most: int, per_address: int) -> None:
        self.most = most
        self.per_address = per_address
        self.num_refused = 0
        self._open: Counter[str] = Counter()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def excess(self, source: str) -> str:
        """Why no other connection from there is taken now, or an empty string."""
        if self._count >= self.most:
            return f"{self._count} connections are open, the limit is {self.most} (max_connections)"
        if self._open[source] >= self.per_address:
            limit = f"{self.per_address} (max_connections_per_address)"
            return f"{self._open[source]} connections from one address are open, the limit is {limit}"
        return ""

    def enter(self, source: str) -> None:
        self._open[source] += 1
        self._count += 1

    def leave(self, source: str) -> None:
        self._open[source] -= 1
        self._count -= 1
        if not self._open[source]:
            del self._open[source]


def make_connections(settings: GatewaySettings) -> Connections:
    """Of one front, by the settings and by how many descriptors this process may have."""
    most = max(FEWEST, min(settings.max_connections, (descriptors.limit() - RESERVED) // NUM_FRONTS))
    return Connections(most, max(1, min(settings.max_connections_per_address, most // 2)))


def source_of(host: str) -> str:
    """The client that an IP address stands for: with IPv6, its network of 64 bits, which is one customer's."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False).network_address)
