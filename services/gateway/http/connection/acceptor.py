"""Takes connections from a listening socket, and rests where this process has no descriptor for another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import structlog

from shared.descriptors import Spares, is_exhausted
from shared.transport.link import worth_a_line

AT_ONCE = 64  # connections, until the event loop does something else
REST_SECONDS = 0.5  # a listening socket stays readable while no connection can be accepted: the loop would spin

log = structlog.get_logger()


class Acceptor:
    """Watches a listening socket, which it owns, through the event loop."""

    def __init__(
        self, listener: socket.socket, take: Callable[[socket.socket, Any], None], *, name: str, spares: Spares
    ) -> None:
        """`take` gets each connection and its address.  `spares` are given up for connections that must be taken."""
        self._listener = listener
        self._take = take
        self._name = name
        self._spares = spares
        self._loop = asyncio.get_running_loop()
        self._rest: asyncio.TimerHandle | None = None
        self.num_rests = 0
        listener.setblocking(False)
        self._watch()

    def _watch(self) -> None:
        self._rest = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        self.accept_all(AT_ONCE)

    def accept_all(self, at_most: int) -> None:
        """Take the connections that wait, so many at most."""
        for _ in range(at_most):
            try:
                connection, address = self._spares.attempt(self._listener.accept)
            except BlockingIOError:
                return
            except OSError as error:
                if is_exhausted(error):
                    self._pause(error)
                    return
                continue  # the client is gone already
            connection.setblocking(False)
            self._take(connection, address)

    def _pause(self, error: OSError) -> None:
        self.num_rests += 1
        if worth_a_line(self.num_rests):
            log.warning(
                "accept_paused", listener=self._name, reason=str(error), seconds=REST_SECONDS, num_pauses=self.num_rests
            )
        if self._rest is None:
            self._loop.remove_reader(self._listener.fileno())
            self._rest = self._loop.call_later(REST_SECONDS, self._watch)

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        if self._rest is not None:
            self._rest.cancel()
        else:
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
