"""Notices that no process listens any more at the far end of a connection, sooner than heartbeats do.

ZeroMQ reconnects silently, but its socket monitor reports each connection that closes.  A process that ends closes
its connections, whatever ended it; but a network may drop one too.  So a process is gone when no process listens at its
address, or, where that cannot be seen, when it is not reached again in a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

LOOK_SECONDS = 0.1  # between looks while it may return
EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


class Watch:
    """Watches one connected socket, until it is stopped."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        gone: Callable[[], None],
        *,
        return_seconds: float,
        may_return: Callable[[], bool],
    ) -> None:
        """`return_seconds` after a connection was lost, and again and again, `may_return` is asked."""
        self._socket = socket
        self._gone = gone
        self._return_seconds = return_seconds
        self._may_return = may_return
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
        """Its descriptor signals the first event only, so each time all are taken."""
        while self._monitor is not None:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                self._verdict = self._verdict or self._loop.call_later(self._return_seconds, self._judge)
            elif self._verdict is not None:
                self._verdict.cancel()
                self._verdict = None

    def _judge(self) -> None:
        self._verdict = None
        if self._may_return():
            self._verdict = self._loop.call_later(LOOK_SECONDS, self._judge)
        else:
            self._gone()
