"""What waits for one destination of the bus, and the socket to it."""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable

import structlog

from shared.descriptors import Spares, is_exhausted
from shared.transport.link import worth_a_line

RETRY_SECONDS = 0.05  # between attempts to reach a destination that is not there
REST_SECONDS = 0.5  # between attempts while this process has no descriptor for another socket
PATIENCE_SECONDS = 30.0  # with a destination where no process listens; then the mail that waits for it is dropped

log = structlog.get_logger()


class NoDescriptorError(BlockingIOError):
    """This process can open no socket at present; of the destination that says nothing."""


class Line:
    """What waits for one destination, and the socket to it while it is there.

    Whole batches wait, the first of them perhaps sent in part; that one is lost with the connection, as all is that a
    dead destination had not read.  The others wait for whoever listens there next.

    Nothing ever comes back on a line, so when its socket can be read, the other end is closed.
    """

    def __init__(
        self,
        path: str,
        loop: asyncio.AbstractEventLoop | None,
        spares: Spares,
        on_gone: Callable[[], None] | None = None,
    ) -> None:
        self._path = path
        self._loop = loop
        self._spares = spares
        self._num_rests = 0
        self._second_look: asyncio.TimerHandle | None = None
        self._on_gone = on_gone
        self._socket: socket.socket | None = None
        self._waiting: deque[bytes] = deque()
        self._num_sent = 0  # bytes of the first batch
        self._retry: asyncio.TimerHandle | None = None
        self._is_full = False
        self._alone_since = 0.0  # when no listener was found, by the loop's clock

    def write(self, batch: bytes) -> None:
        self._waiting.append(batch)
        if not self._is_full and self._retry is None:
            self._push()

    def _push(self) -> None:
        """Send until nothing waits, the socket is full, or no process listens."""
        self._retry = None
        while self._waiting:
            try:
                connection = self._connected()
                self._num_sent += connection.send(memoryview(self._waiting[0])[self._num_sent :])
            except NoDescriptorError as error:
                self._rest(error)
                return
            except BlockingIOError:
                if self._socket is None or self._loop is not None:
                    self._resume_later()
                    return
                wait_for_room(self._socket)
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
        """Raises OSError where no process listens, BlockingIOError where too many wait to be accepted,
        NoDescriptorError where there is no descriptor for a socket."""
        if self._socket is None:
            try:
                connection = self._spares.attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            except OSError as error:
                raise NoDescriptorError(error.errno, error.strerror) from error
            connection.setblocking(False)
            try:
                connection.connect(self._path)
            except OSError as error:
                connection.close()
                if is_exhausted(error):  # of the machine's memory for sockets
                    raise NoDescriptorError(error.errno, error.strerror) from error
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
        self._second_look = None
        if self._on_gone is None:
            return
        try:
            self._connected()
        except NoDescriptorError:  # it cannot be told at present
            if self._loop is not None:
                self._second_look = self._loop.call_later(REST_SECONDS, self._look)
        except BlockingIOError:  # so many want to be let in: somebody does listen
            pass
        except OSError:
            self._on_gone()

    def _rest(self, error: NoDescriptorError) -> None:
        """Try again later.  Nothing is thrown away: the destination may well listen."""
        self._num_rests += 1
        if worth_a_line(self._num_rests):
            log.warning("connect_paused", path=self._path, reason=str(error), num_pauses=self._num_rests)
        if self._loop is not None:
            self._retry = self._loop.call_later(REST_SECONDS, self._push)

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
        for timer in (self._retry, self._second_look):
            if timer is not None:
                timer.cancel()
        self._unwatch()
        if self._waiting and linger:
            try:
                connection = self._connected()
                connection.settimeout(linger)
                connection.sendall(b"".join(self._waiting)[self._num_sent :])
            except OSError:
                pass  # no process is there to read it
        self._num_sent = 0
        self._disconnect()


def wait_for_room(connection: socket.socket) -> None:
    """Block until a full socket takes more, whatever the number of its descriptor."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    poll.poll()
