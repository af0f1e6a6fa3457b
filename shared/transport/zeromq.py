"""ZeroMQ's PUSH to PULL: how processes talk, on one host (`ipc://`) and across hosts (`tcp://` with CURVE).

One socket is bound per process (its inbox); every destination gets a socket that is connected once.  Sends never
block: memory is bounded by admission at the gateways, so the high-water marks are off.
"""

from __future__ import annotations

from typing import Any

import zmq

from shared.config import DeploymentSettings
from shared.messages.codec import MAX_MESSAGE_BYTES
from shared.processes.descriptors import Spares
from shared.transport.addresses import Addresses
from shared.transport.inbox import ZmqInbox
from shared.transport.ipc import IpcAddresses
from shared.transport.link import Inbox
from shared.transport.outbox import LINGER_MS, ZmqOutbox
from shared.transport.tcp import TcpAddresses

NUM_SPARES = 16  # descriptors that the bus of a process gives up for itself when others have taken the rest


class ZmqTransport:
    """Sockets of one process."""

    def __init__(self, settings: DeploymentSettings) -> None:
        self.context = zmq.Context()
        self._spares = Spares(NUM_SPARES)
        self._addresses: Addresses
        if settings.transport == "ipc":
            self._addresses = IpcAddresses(settings)
        else:
            self._addresses = TcpAddresses(settings, self.context, self._spares)
        self._inboxes: list[ZmqInbox] = []

    @property
    def scheduler_address(self) -> str:
        return self._addresses.scheduler

    def bind(self, name: str, union: Any) -> Inbox[Any]:
        """Bind this process's inbox; the scheduler's address is well known, others are announced."""
        socket = self.pull_socket()
        try:
            inbox = self._addresses.bind(name, union, socket)
        except Exception:
            socket.close()
            raise
        self._inboxes.append(inbox)
        return inbox

    def pull_socket(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        return socket

    def outbox(self) -> ZmqOutbox:
        return ZmqOutbox(self.context, self._addresses, self._spares)

    def keep(self) -> str:
        return self._addresses.keep()

    def close(self) -> None:
        for inbox in self._inboxes:  # the event loop must not watch a closed socket
            inbox.close()
        self._addresses.close()
        self._spares.close()
        self.context.destroy(linger=LINGER_MS)
