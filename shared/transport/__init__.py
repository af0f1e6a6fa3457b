"""Moving bytes between actors: an inbox to read from, an outbox to write to; on one host, across hosts, or in one
process."""

from __future__ import annotations

from shared.config import Settings
from shared.transport.link import Inbox, Outbox, Transport
from shared.transport.memory import MemoryTransport
from shared.transport.sharding import pick, rank
from shared.transport.unix import UnixTransport

__all__ = ["Inbox", "MemoryTransport", "Outbox", "Transport", "UnixTransport", "make_transport", "pick", "rank"]


def make_transport(settings: Settings) -> Transport:
    """The transport that the settings name.  Raises ConfigError where its directory cannot be used."""
    if settings.transport == "ipc":
        return UnixTransport(settings)
    from shared.transport.zeromq import ZmqTransport  # only who talks across hosts loads it

    return ZmqTransport(settings)
