"""Takes a listener away for a while when this process has no descriptor for another connection."""

from __future__ import annotations

import asyncio

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.processes.descriptors import Spares, is_exhausted
from shared.transport.link import worth_a_line

REST_SECONDS = 0.5
ROOM = 8  # spare descriptors that binding again may take: ZeroMQ ends the process where it cannot ask for interfaces

log = structlog.get_logger()


class ListenerRests:
    """Takes a socket's listener away for a while when this process has no descriptor for another connection.

    ZeroMQ itself would try again at once and for ever, with all of its thread's time.  With the listener it ends the
    connections that exist, whose senders connect again; what they send first meanwhile is lost.
    """

    def __init__(self, socket: zmq.Socket[bytes], spares: Spares) -> None:
        self._socket = socket
        self._spares = spares
        self._endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop = asyncio.get_running_loop()
        self._rest: asyncio.TimerHandle | None = None
        self.num_rests = 0
        self._monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPT_FAILED)
        self._loop.add_reader(self._monitor.fileno(), self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        while not self._monitor.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if self._rest is None and is_exhausted(OSError(event["value"], "accept")):
                self._pause()

    def _pause(self) -> None:
        self.num_rests += 1
        if worth_a_line(self.num_rests):
            log.warning("accept_paused", listener=self._endpoint, seconds=REST_SECONDS, num_pauses=self.num_rests)
        self._socket.unbind(self._endpoint)
        self._rest = self._loop.call_later(REST_SECONDS, self._resume)

    def _resume(self) -> None:
        try:
            self._spares.make_room(ROOM)
            self._socket.bind(self._endpoint)
            self._rest = None
        except (OSError, zmq.ZMQError):  # no descriptor for the listener either
            self._rest = self._loop.call_later(REST_SECONDS, self._resume)

    def stop(self) -> None:
        """Before the socket is closed."""
        if self._rest is not None:
            self._rest.cancel()
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
