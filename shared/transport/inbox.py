"""The bound socket of a process."""

from __future__ import annotations

import asyncio
from typing import Any

import zmq

from shared.transport.link import Inbox

MAX_BATCH = 4096


class ZmqInbox(Inbox[Any]):
    """Reads the socket through the event loop's file-descriptor watch.

    ZeroMQ's descriptor is edge-triggered, so every wake-up reads until the socket is empty; one wake-up serves
    everything that has arrived.
    """

    def __init__(self, address: str, union: Any, socket: zmq.Socket[bytes]) -> None:
        super().__init__(address, union)
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._socket.closed:
            return
        for _ in range(MAX_BATCH):
            try:
                self.deliver(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
