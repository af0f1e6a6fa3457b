"""The connected sockets of a process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import structlog
import zmq

from shared.messages import Message
from shared.processes.descriptors import Spares, is_exhausted
from shared.transport.addresses import Addresses
from shared.transport.link import PendingFrames, worth_a_line
from shared.transport.watch import Watch

LINGER_MS = 500
MAX_DESTINATIONS = 512  # half of the sockets that one context can have
MAX_WATCHED = 128  # of them; each takes two more
MAX_SHOWN = 100  # characters of a malformed address
REST_SECONDS = 0.5  # between attempts while this process has no descriptor for another socket
ROOM = 8  # spare descriptors that a connection may take: ZeroMQ ends the process where it cannot look up a name
PATIENCE_SECONDS = 30.0  # between looks at which destinations no process listens; after two, their messages are dropped

log = structlog.get_logger()


class ZmqOutbox:
    """One connected PUSH socket per destination."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses, spares: Spares) -> None:
        self._context = context
        self._addresses = addresses
        self._spares = spares
        self.on_gone: Callable[[str], None] | None = None
        self._sockets: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()
        self._watches: dict[str, Watch] = {}
        self._pending = PendingFrames()
        self._waiting: dict[str, list[bytes]] = {}  # for a socket, while there is no descriptor for one
        self._retry_at = 0.0
        self._vacant: set[str] = set()
        self._look_at = time.monotonic() + PATIENCE_SECONDS
        self._num_rests = 0
        self._num_refused = 0

    @property
    def destinations(self) -> list[str]:
        """Those that have a socket, the one used least lately first."""
        return list(self._sockets)

    def send(self, address: str, message: Message) -> None:
        self._pending.add(address, message)

    def flush(self) -> None:
        if time.monotonic() >= self._retry_at:
            self._retry()
        for address, frames in self._pending.take().items():
            if address in self._waiting:
                self._waiting[address] += frames
            else:
                self._send(address, frames)

    def _retry(self) -> None:
        """Occasional work."""
        now = time.monotonic()
        self._retry_at = now + REST_SECONDS
        self._spares.refill()
        waiting, self._waiting = self._waiting, {}
        for address, frames in waiting.items():
            self._send(address, frames)
        if now >= self._look_at:
            self._look_at = now + PATIENCE_SECONDS
            self._drop_vacant()

    def _send(self, address: str, frames: list[bytes]) -> None:
        """What there is no descriptor for waits for a later flush; members flush with every heartbeat."""
        try:
            if socket := self._socket(address):
                socket.send_multipart(frames, zmq.NOBLOCK)
        except OSError as error:
            if not is_exhausted(error):
                raise
            self._num_rests += 1
            if worth_a_line(self._num_rests):
                log.warning("connect_paused", address=address, reason=str(error), num_pauses=self._num_rests)
            self._waiting[address] = frames

    def _drop_vacant(self) -> None:
        """Drop what waits where no process has listened since the last look."""
        if (is_vacant := self._addresses.is_vacant) is None:
            return
        before, self._vacant = self._vacant, {address for address in self._sockets if is_vacant(address)}
        for address in before & self._vacant:
            self._close(address, linger=0)

    def forget(self, address: str) -> None:
        self._pending.drop(address)
        self._waiting.pop(address, None)
        if address in self._sockets:
            self._close(address, linger=0)

    def close(self) -> None:
        """Give what waits a moment to get out, where a process listens."""
        self.flush()
        is_vacant = self._addresses.is_vacant
        for address in self.destinations:
            self._close(address, linger=0 if is_vacant is not None and is_vacant(address) else LINGER_MS)

    def _close(self, address: str, linger: int) -> None:
        if watch := self._watches.pop(address, None):
            watch.stop()
        self._sockets.pop(address).close(linger=linger)

    def _refuse(self, address: str, reason: str) -> None:
        self._num_refused += 1
        if worth_a_line(self._num_refused):
            log.warning("address_refused", address=address[:MAX_SHOWN], reason=reason, num_refused=self._num_refused)

    def _socket(self, address: str) -> zmq.Socket[bytes] | None:
        """The socket to a destination; None where none can be.  Of too many, that used least lately goes."""
        if address in self._sockets:
            self._sockets.move_to_end(address)
            return self._sockets[address]
        if objection := self._addresses.objection(address):
            self._refuse(address, objection)
            return None
        self._sockets[address] = socket = self._opened(address)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self._close(address, linger=0)
            self._refuse(address, str(error))
            return None
        if len(self._sockets) > MAX_DESTINATIONS:
            self._close(next(iter(self._sockets)), linger=0)
        return socket

    def _opened(self, address: str) -> zmq.Socket[bytes]:
        """A socket that is not connected yet, and its watch.  Raises OSError where there are no descriptors for it."""
        self._spares.make_room(ROOM)
        self._retry_at = time.monotonic() + REST_SECONDS  # until when ZeroMQ has taken what it needs of that room
        try:
            socket = self._context.socket(zmq.PUSH)
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error
        try:
            socket.setsockopt(zmq.SNDHWM, 0)
            self._addresses.prepare(socket)
            self._watch(address, socket)  # before it connects, so that no event is missed
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise OSError(error.errno, str(error)) from error
        return socket

    def _watch(self, address: str, socket: zmq.Socket[bytes]) -> None:
        """Call `on_gone`, where there is one.  Of too many, those used last are left to heartbeats."""
        if (on_gone := self.on_gone) is None or len(self._watches) >= MAX_WATCHED:
            return
        is_vacant = self._addresses.is_vacant
        self._watches[address] = Watch(
            socket,
            lambda: on_gone(address),
            return_seconds=self._addresses.return_seconds,
            may_return=lambda: is_vacant is not None and not is_vacant(address),
        )
