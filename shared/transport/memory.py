"""The in-process twin of the ZeroMQ transport, for tests: it still encodes and decodes every message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.messages import Message
from shared.transport.link import Inbox, PendingFrames

SCHEDULER = "memory://scheduler"


class MemoryTransport:
    """One network of actors inside one event loop."""

    def __init__(self) -> None:
        self.inboxes: dict[str, MemoryInbox] = {}

    @property
    def scheduler_address(self) -> str:
        return SCHEDULER

    def bind(self, name: str, union: Any) -> Inbox[Any]:
        address = f"memory://{name}"
        self.inboxes[address] = MemoryInbox(address, union, self)
        return self.inboxes[address]

    def outbox(self) -> MemoryOutbox:
        return MemoryOutbox(self)

    def keep(self) -> str:
        return ""

    def close(self) -> None:
        self.inboxes.clear()


class MemoryInbox(Inbox[Any]):
    def __init__(self, address: str, union: Any, network: MemoryTransport) -> None:
        super().__init__(address, union)
        self._network = network

    def close(self) -> None:
        if self._network.inboxes.get(self.address) is self:
            del self._network.inboxes[self.address]


class MemoryOutbox:
    """Delivers straight into the other's mailbox; mail to an absent actor is lost, as on a real network."""

    def __init__(self, network: MemoryTransport) -> None:
        self.on_gone: Callable[[str], None] | None = None  # never called here
        self._network = network
        self._pending = PendingFrames()

    def send(self, address: str, message: Message) -> None:
        self._pending.add(address, message)

    def flush(self) -> None:
        for address, frames in self._pending.take().items():
            if inbox := self._network.inboxes.get(address):
                inbox.deliver(frames)

    def forget(self, address: str) -> None:
        self._pending.drop(address)

    def close(self) -> None:
        self.flush()
