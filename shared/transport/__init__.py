"""Moving bytes between actors: an inbox to read from, an outbox to write to, over ZeroMQ or in one process."""

from __future__ import annotations

from shared.transport.link import Inbox, Outbox, Transport
from shared.transport.memory import MemoryTransport
from shared.transport.sharding import pick, rank
from shared.transport.zeromq import ZmqTransport

__all__ = ["Inbox", "MemoryTransport", "Outbox", "Transport", "ZmqTransport", "pick", "rank"]
