"""Frames over Unix stream sockets: how the processes of one host talk.

A frame is its length (4 bytes, little-endian) and its bytes.  The inbox listens; every outbox connects once to each
destination and writes straight into its socket, so that one message costs one wake-up: the receiver's.  Sends never
block an event loop: what a socket does not take waits in memory, which admission at the gateways bounds.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import structlog

from shared.config import Settings
from shared.descriptors import Spares
from shared.errors import ConfigError, ProtocolError
from shared.messages import Message
from shared.messages.codec import MAX_MESSAGE_BYTES
from shared.transport.acceptor import Acceptor
from shared.transport.directory import BACKLOG, LOCK, MAX_PATH, claim, fits, identity, is_at, listening, make_private
from shared.transport.line import Line
from shared.transport.link import Inbox, PendingFrames, worth_a_line

LINGER_SECONDS = 0.5
READ_BYTES = 256 << 10
SCHEDULER = "scheduler"
SCHEME = "ipc://"
ENDING = ".sock"
OWN_PARENT = "pageant-"  # of the default runtime directory, among everybody's in /tmp
NUM_SPARES = 16  # descriptors that the bus of a process gives up for itself when others have taken the rest

_length = struct.Struct("<I")
log = structlog.get_logger()


class UnixTransport:
    """Sockets of one process, in the deployment's private directory."""

    def __init__(self, settings: Settings) -> None:
        self._directory = settings.runtime_path
        self._claim: IO[str] | None = None
        self._inboxes: list[UnixInbox] = []
        self._spares = Spares(NUM_SPARES)
        self._enter()

    def _enter(self) -> None:
        if self._directory.parent.name.startswith(OWN_PARENT):
            make_private(self._directory.parent)  # whoever owned it could put another directory in place of ours
        make_private(self._directory)

    @property
    def scheduler_address(self) -> str:
        return f"{SCHEME}{self._path(SCHEDULER)}"

    def bind(self, name: str, union: Any) -> Inbox[Any]:
        """Bind this process's inbox; the scheduler's address is well known, others are announced."""
        path = self._path(name)
        if not fits(str(path)):
            raise ConfigError(f"runtime_dir is too long for a socket's name: {self._directory}")
        if name == SCHEDULER:
            self._claim = claim(self._directory)
            path.unlink(missing_ok=True)  # an earlier life's; this claim says that it is over
        self._inboxes.append(UnixInbox(path, union, self._spares))
        return self._inboxes[-1]

    def outbox(self) -> UnixOutbox:
        return UnixOutbox(self._directory, self._spares)

    def keep(self) -> str:
        """The lock first: the process that holds it may have the scheduler's socket."""
        has_claim = self._claim is None or is_at(self._directory / LOCK, self._claim.fileno())
        missing = [inbox for inbox in self._inboxes if not inbox.is_in_place]
        if has_claim and not missing:
            return ""
        self._enter()
        if not has_claim:
            lost, self._claim = self._claim, claim(self._directory)
            assert lost is not None  # it had one
            lost.close()
        for inbox in missing:
            inbox.renew()
        return "its socket" if has_claim else "its lock and its socket"

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.close()
        if self._claim is not None:
            self._claim.close()
        self._spares.close()

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}{ENDING}"


class UnixInbox(Inbox[Any]):
    """Listens, and reads every connection through the event loop's watch; one reading takes all that has arrived."""

    def __init__(self, path: Path, union: Any, spares: Spares | None = None) -> None:
        """`spares`: descriptors given up for connections, where the table is full."""
        spares = Spares(0) if spares is None else spares
        super().__init__(f"{SCHEME}{path}", union)
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._connections: set[socket.socket] = set()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._spares = spares
        self._acceptor: Acceptor | None = self._acceptor_of(listening(path))
        self._place = identity(path)

    def _acceptor_of(self, listener: socket.socket) -> Acceptor:
        return Acceptor(listener, self._take, name=self._path.name, spares=self._spares)

    @property
    def is_in_place(self) -> bool:
        """Whether a process that connects to our address still comes to us."""
        return self._place is not None and identity(self._path) == self._place

    def renew(self) -> None:
        """Listen at our address again.  Connections stay, those included that wait to be accepted.

        Raises OSError where no socket can listen there at present.
        """
        self._path.unlink(missing_ok=True)
        fresh = listening(self._path)
        if self._acceptor is not None:
            self._acceptor.accept_all(BACKLOG)
            self._acceptor.close()
        self._acceptor, self._place = self._acceptor_of(fresh), identity(self._path)

    def _take(self, connection: socket.socket, _: Any) -> None:
        self._connections.add(connection)
        self._loop.add_reader(connection.fileno(), self._read, connection, Frames())

    def _read(self, connection: socket.socket, frames: Frames) -> None:
        try:
            count = connection.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        try:
            if count:
                self.deliver(frames.feed(self._buffer[:count]))
                return
        except ProtocolError as error:
            log.warning("connection_dropped", reason=str(error))
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._loop.remove_reader(connection.fileno())
        self._connections.discard(connection)
        connection.close()

    def close(self) -> None:
        if self._acceptor is None:
            return
        self._acceptor.close()
        self._acceptor = None
        for connection in list(self._connections):
            self._drop(connection)
        if self.is_in_place:  # else it is somebody else's
            self._path.unlink(missing_ok=True)


class Frames:
    """Cuts one connection's bytes into frames.

    The frames of `feed` may lie in the bytes that it was given: they are to be read before those are written again.
    """

    def __init__(self) -> None:
        self._partial = bytearray()
        self._missing = 0  # bytes until the partial frame is worth another look

    def feed(self, data: memoryview) -> list[memoryview]:
        """The frames that are complete with `data`.  Raises ProtocolError on one that is too long."""
        if self._partial or len(data) < self._missing:
            self._partial += data
            self._missing -= len(data)
            if self._missing > 0:
                return []
            data, self._partial = memoryview(self._partial), bytearray()
        frames, start, end = [], 0, len(data)
        while end - start >= _length.size:
            (length,) = _length.unpack_from(data, start)
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"message of {length} bytes, more than {MAX_MESSAGE_BYTES}")
            if end - start - _length.size < length:
                break
            frames.append(data[start + _length.size : start + _length.size + length])
            start += _length.size + length
        self._keep(data[start:])
        return frames

    def _keep(self, rest: memoryview) -> None:
        self._partial += rest
        needed = _length.size
        if len(rest) >= _length.size:
            needed += _length.unpack_from(rest)[0]
        self._missing = needed - len(rest)


class UnixOutbox:
    """One line to each destination.  In a thread without an event loop a full socket is waited for.

    Destinations come in messages, so they are believed only so far as they lie in the deployment's own directory.
    """

    def __init__(self, directory: Path, spares: Spares | None = None) -> None:
        self._spares = Spares(0) if spares is None else spares
        self._prefix = f"{SCHEME}{directory}/"
        self._num_refused = 0
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self.on_gone: Callable[[str], None] | None = None
        self._lines: dict[str, Line] = {}
        self._pending = PendingFrames()

    def send(self, address: str, message: Message) -> None:
        self._pending.add(address, message)

    def flush(self) -> None:
        for address, frames in self._pending.take().items():
            line = self._lines.get(address)
            if line is None:
                if not self._is_ours(address):
                    self._refuse(address)
                    continue
                line = self._lines[address] = self._line(address)
            line.write(b"".join([part for frame in frames for part in (_length.pack(len(frame)), frame)]))

    def _refuse(self, address: str) -> None:
        self._num_refused += 1
        if worth_a_line(self._num_refused):
            log.warning("address_refused", address=address[:MAX_PATH], num_refused=self._num_refused)

    def _is_ours(self, address: str) -> bool:
        name = address.removeprefix(self._prefix)
        return name != address and name.endswith(ENDING) and "/" not in name and fits(address.removeprefix(SCHEME))

    def _line(self, address: str) -> Line:
        on_gone = partial(self.on_gone, address) if self.on_gone is not None else None
        return Line(address.removeprefix(SCHEME), self._loop, self._spares, on_gone)

    def forget(self, address: str) -> None:
        self._pending.drop(address)
        if line := self._lines.pop(address, None):
            line.close(linger=0)

    def close(self) -> None:
        self.flush()
        for line in self._lines.values():
            line.close(linger=LINGER_SECONDS)
        self._lines.clear()
