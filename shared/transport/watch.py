"""Notices that nobody listens any more at the far end of a TCP connection, sooner than heartbeats do.

ZeroMQ reconnects silently, but its socket monitor tells of each connection that closes.  A process that ends closes
its connections, whatever ended it; a network may drop one too.  So who is not reached again in a moment is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

RETURN_SECONDS = 0.4  # in which ZeroMQ, which tries every tenth of a second, reaches whoever is still there
EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


class Watch:
    """Watches one connected socket, until it is stopped or has told once."""

    def __init__(self, socket: zmq.Socket[bytes], gone: Callable[[], None]) -> None:
        self._socket = socket
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.TimerHandle | None = None
        self._monitor: zmq.Socket[bytes] | None = socket.get_monitor_socket(EVENTS)
        self._loop.add_reader(self._monitor.fileno(), self._drain)
        self._loop.call_soon(self._drain)

    def stop(self) -> None:
        """Before the socket is closed."""
        if self._verdict is not None:
            self._verdict.cancel()
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None

    def _drain(self) -> None:
        """Its descriptor tells of the first event only, so each time all are taken."""
        while self._monitor is not None:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                self._verdict = self._verdict or self._loop.call_later(RETURN_SECONDS, self._tell)
            elif self._verdict is not None:
                self._verdict.cancel()
                self._verdict = None

    def _tell(self) -> None:
        self.stop()
        self._gone()
