"""The HTTP front's listening socket: which connections are taken, and how the others are refused."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from services.gateway.access.connections import Connections, source_of
from services.gateway.http.connection.protocol import BoundedProtocol, whole_response
from services.gateway.http.errors.failures import error_body
from shared.errors import ConfigError, RejectCode, RequestError
from shared.processes.descriptors import is_exhausted
from shared.transport.link import worth_a_line

BACKLOG = 2048
RECEIVE_BUFFER = 256 << 10  # bytes that the kernel holds of a connection whose body is not read; else megabytes
MAX_FAREWELLS = 64  # refused connections that stay open for a moment: closed at once, an answer may not be read
FAREWELL_SECONDS = 1.0
REST_SECONDS = 0.5  # where no connection can be accepted: the socket stays readable, and the loop would spin

log = structlog.get_logger()


class Listener:
    """Takes connections as far as there is room; to uvicorn it is an asyncio server."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], BoundedProtocol],
        connections: Connections,
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout: float,
    ) -> None:
        self.connections = connections
        self._make = make
        self._tls = tls
        self._handshake_timeout = handshake_timeout
        self._loop = asyncio.get_running_loop()
        self._starting: set[asyncio.Task[None]] = set()
        self._farewells: deque[socket.socket] = deque()
        self._accepting = self._loop.create_task(accept(listener, self._take))

    def _take(self, connection: socket.socket, address: Any) -> None:
        source = source_of(address[0])
        if reason := self.connections.excess(source):
            self._refuse(connection, source, reason)
            return
        self.connections.enter(source)
        task = self._loop.create_task(self._start(connection, source))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, connection: socket.socket, source: str) -> None:
        protocol: BoundedProtocol | None = None
        try:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            more: dict[str, Any] = {}
            if self._tls is not None:
                more = {"ssl": self._tls, "ssl_handshake_timeout": self._handshake_timeout}
            _, protocol = await self._loop.connect_accepted_socket(self._make, connection, **more)
        except (OSError, asyncio.CancelledError):  # the client has gone, or does not speak TLS in time
            pass
        finally:
            if protocol is None:
                connection.close()
                self.connections.leave(source)
            else:
                protocol.closed.add_done_callback(lambda _: self.connections.leave(source))

    def _refuse(self, connection: socket.socket, source: str, reason: str) -> None:
        connections = self.connections
        connections.num_refused += 1
        if worth_a_line(connections.num_refused):
            log.warning("connection_refused", source=source, reason=reason, num_refused=connections.num_refused)
        if self._tls is not None:  # an answer would cost a handshake
            connection.close()
            return
        error = RequestError(reason, code=RejectCode.UNAVAILABLE)
        with contextlib.suppress(OSError):
            connection.send(whole_response(503, error_body(error, {}), "retry-after: 1"))
            connection.shutdown(socket.SHUT_WR)
        self._farewells.append(connection)
        if len(self._farewells) > MAX_FAREWELLS:
            self._farewells.popleft().close()
        self._loop.call_later(FAREWELL_SECONDS, self._part, connection)

    def _part(self, connection: socket.socket) -> None:
        with contextlib.suppress(ValueError):  # its place was needed
            self._farewells.remove(connection)
        connection.close()

    def close(self) -> None:
        self._accepting.cancel()
        for task in self._starting:
            task.cancel()
        while self._farewells:
            self._farewells.popleft().close()

    async def wait_closed(self) -> None:
        if self._starting:
            await asyncio.wait(self._starting)


async def accept(listener: socket.socket, take: Callable[[socket.socket, Any], None]) -> None:
    """Have `take` get each connection and its address, until this is cancelled; rest where there is no descriptor for
    another."""
    loop, num_rests = asyncio.get_running_loop(), 0
    listener.setblocking(False)
    while True:
        try:
            take(*await loop.sock_accept(listener))
            seconds = 0.0
        except OSError as error:  # most often the client is gone already
            seconds = REST_SECONDS if is_exhausted(error) else 0.0
            num_rests += bool(seconds)
            if seconds and worth_a_line(num_rests):
                log.warning("accept_paused", listener="http", reason=str(error), seconds=seconds, num_pauses=num_rests)
        await asyncio.sleep(seconds)


def listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    """A listening socket, whose port others may `share`; raises ConfigError where there is none to be had."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)  # those that are taken inherit it
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((bare, port))
        listener.listen(BACKLOG)  # from here on clients wait, and are not refused
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror}; choose another http_port, or -1 for none"
        ) from error
    return listener
