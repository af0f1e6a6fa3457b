"""Frames over Unix stream sockets: how the processes of one host talk.

A frame is its length (4 bytes, little-endian) and its bytes.  The inbox listens; every outbox connects once to each
destination and writes straight into its socket, so that one message costs one wake-up: the receiver's.  Sends never
block an event loop: what a socket does not take waits in memory, which admission at the gateways bounds.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import structlog

from shared.config import Settings
from shared.errors import ConfigError, ProtocolError
from shared.messages import Message
from shared.messages.codec import MAX_MESSAGE_BYTES
from shared.transport.link import Inbox, PendingFrames, worth_a_line

LINGER_SECONDS = 0.5
RETRY_SECONDS = 0.05  # between attempts to reach a destination that is not there
READ_BYTES = 256 << 10
BACKLOG = 1024
SCHEDULER = "scheduler"
MAX_PATH = 107  # sockaddr_un holds 108 bytes with the final zero
SCHEME = "ipc://"
ENDING = ".sock"
OWN_PARENT = "pageant-"  # of the default runtime directory, among everybody's in /tmp
PATIENCE_SECONDS = 30.0  # with a destination that nobody listens at; then what waits for it is thrown away

_length = struct.Struct("<I")
log = structlog.get_logger()


class UnixTransport:
    """Sockets of one process, in the deployment's private directory."""

    def __init__(self, settings: Settings) -> None:
        self._directory = settings.runtime_path
        self._claim: IO[str] | None = None
        self._inboxes: list[UnixInbox] = []
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
        self._inboxes.append(UnixInbox(path, union))
        return self._inboxes[-1]

    def outbox(self) -> UnixOutbox:
        return UnixOutbox(self._directory)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.close()
        if self._claim is not None:
            self._claim.close()

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}{ENDING}"


class UnixInbox(Inbox[Any]):
    """Listens, and reads every connection through the event loop's watch; one reading takes all that has arrived."""

    def __init__(self, path: Path, union: Any) -> None:
        super().__init__(f"{SCHEME}{path}", union)
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._connections: set[socket.socket] = set()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(BACKLOG)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # who wanted to connect is gone already
            return
        connection.setblocking(False)
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
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for connection in list(self._connections):
            self._drop(connection)
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

    def __init__(self, directory: Path) -> None:
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
        return Line(address.removeprefix(SCHEME), self._loop, on_gone)

    def forget(self, address: str) -> None:
        self._pending.drop(address)
        if line := self._lines.pop(address, None):
            line.close(linger=0)

    def close(self) -> None:
        self.flush()
        for line in self._lines.values():
            line.close(linger=LINGER_SECONDS)
        self._lines.clear()


class Line:
    """What waits for one destination, and the socket to it while it is there.

    Whole batches wait, the first of them perhaps sent in part; that one is lost with the connection, as all is that a
    dead destination had not read.  The others wait for whoever listens there next.

    Nothing ever comes back on a line, so when its socket can be read, the other end is closed.
    """

    def __init__(
        self, path: str, loop: asyncio.AbstractEventLoop | None, on_gone: Callable[[], None] | None = None
    ) -> None:
        self._path = path
        self._loop = loop
        self._on_gone = on_gone
        self._socket: socket.socket | None = None
        self._waiting: deque[bytes] = deque()
        self._num_sent = 0  # bytes of the first batch
        self._retry: asyncio.TimerHandle | None = None
        self._is_full = False
        self._alone_since = 0.0  # when nobody was found to listen, by the loop's clock

    def write(self, batch: bytes) -> None:
        self._waiting.append(batch)
        if not self._is_full and self._retry is None:
            self._push()

    def _push(self) -> None:
        """Send until nothing waits, the socket is full, or nobody listens."""
        self._retry = None
        while self._waiting:
            try:
                connection = self._connected()
                self._num_sent += connection.send(memoryview(self._waiting[0])[self._num_sent :])
            except BlockingIOError:
                if self._socket is None or self._loop is not None:
                    self._resume_later()
                    return
                select.select([], [self._socket], [])
            except OSError:
                was_connected = self._socket is not None
                self._disconnect()
                if was_connected:
                    self._look()
                self._resume_later()
                return
            if self._num_sent == len(self._waiting[0]):
                self._waiting.popleft()
                self._num_sent = 0

    def _connected(self) -> socket.socket:
        """Raises OSError where nobody listens, BlockingIOError where too many wait to be let in."""
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            try:
                connection.connect(self._path)
            except OSError:
                connection.close()
                raise
            self._socket = connection
            self._alone_since = 0.0
            if self._loop is not None:
                self._loop.add_reader(connection.fileno(), self._hung_up)
        return self._socket

    def _hung_up(self) -> None:
        self._disconnect()
        self._look()
        if self._waiting and self._retry is None:
            self._resume_later()

    def _look(self) -> None:
        """After a hang-up: its process has ended, unless somebody listens there still."""
        if self._on_gone is None:
            return
        try:
            self._connected()
        except BlockingIOError:  # so many want to be let in: somebody does listen
            pass
        except OSError:
            self._on_gone()

    def _resume_later(self) -> None:
        """When the socket has room, or for another try after a while; in a thread, with the next batch."""
        if self._loop is None:
            return
        if self._socket is None:
            now = self._loop.time()
            self._alone_since = self._alone_since or now
            if now - self._alone_since > PATIENCE_SECONDS:
                self._waiting.clear()
                self._alone_since = 0.0
            else:
                self._retry = self._loop.call_later(RETRY_SECONDS, self._push)
        elif not self._is_full:
            self._is_full = True
            self._loop.add_writer(self._socket.fileno(), self._has_room)

    def _has_room(self) -> None:
        self._unwatch()
        self._push()

    def _unwatch(self) -> None:
        if self._is_full and self._loop is not None and self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())
        self._is_full = False

    def _disconnect(self) -> None:
        self._unwatch()
        if self._socket is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._num_sent:
            self._waiting.popleft()
            self._num_sent = 0

    def close(self, linger: float) -> None:
        """Give what waits `linger` seconds to get out."""
        if self._retry is not None:
            self._retry.cancel()
        self._unwatch()
        if self._waiting and linger:
            try:
                connection = self._connected()
                connection.settimeout(linger)
                connection.sendall(b"".join(self._waiting)[self._num_sent :])
            except OSError:
                pass  # nobody is there to read it
        self._num_sent = 0
        self._disconnect()


def claim(directory: Path) -> IO[str]:
    """Hold a deployment's directory for its one scheduler, until this file is closed or the process ends.

    Another would take the socket away from the scheduler that is there.  Raises ConfigError where one is.
    """
    file = (directory / "scheduler.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(
            f"a scheduler runs in {directory} already; give this deployment a runtime_dir of its own"
        ) from error
    return file


def fits(path: str) -> bool:
    """Whether a socket can have this name."""
    try:
        return len(os.fsencode(path)) <= MAX_PATH and "\0" not in path
    except UnicodeEncodeError:
        return False


def make_private(directory: Path) -> None:
    """Create a directory that only this user can enter.  Raises ConfigError where another user owns it."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(f"runtime_dir {directory} belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        directory.chmod(0o700)
