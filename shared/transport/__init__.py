"""Moving bytes between actors: an inbox to read from, an outbox to write to; over ZeroMQ, or in one process."""

from __future__ import annotations

from shared.config import DeploymentSettings
from shared.transport.link import Inbox, Outbox, Transport
from shared.transport.memory import MemoryTransport
from shared.transport.sharding import pick, rank

__all__ = ["Inbox", "MemoryTransport", "Outbox", "Transport", "make_transport", "pick", "rank"]


def make_transport(settings: DeploymentSettings) -> Transport:
    """The transport that the settings name.  Raises ConfigError where its directory cannot be used."""
    from shared.transport.zeromq import ZmqTransport  # a process that only picks a destination does not load it

    return ZmqTransport(settings)
