"""ZeroMQ's PUSH to PULL over CURVE-encrypted tcp://: how processes on several hosts talk.

One socket is bound per process (its inbox); every destination gets a socket that is connected once.  Sends never
block: memory is bounded by admission at the gateways, so the high-water marks are off.  Receiving reads ahead
without waiting until the socket is empty, so that one wake-up serves everything that has arrived.
"""

from __future__ import annotations

import asyncio
import re
import socket as sockets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.config import Settings
from shared.descriptors import Spares, is_exhausted
from shared.errors import ConfigError
from shared.messages import Message
from shared.messages.codec import MAX_MESSAGE_BYTES
from shared.transport.keys import KeyFile, KeyGuard, Keys, load_keys
from shared.transport.link import Inbox, PendingFrames, worth_a_line
from shared.transport.watch import Watch

LINGER_MS = 500
MAX_BATCH = 4096
SCHEDULER = "scheduler"
ADDRESS = re.compile(r"tcp://(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
MAX_DESTINATIONS = 512  # half of the sockets that one context can have
MAX_WATCHED = 128  # of them; each takes two more
MAX_SHOWN = 100  # characters of an address that is none
NAME_SECONDS = 15.0  # until the scheduler's name must lead somewhere; it may be starting
NAME_POLL = 0.2
NUM_SPARES = 16  # descriptors that are given up for the bus when others have taken the rest
ROOM = 8  # of them, to bind or to connect: ZeroMQ ends the process where it cannot ask for interfaces or names
REST_SECONDS = 0.5  # between attempts while this process has no descriptor for another socket
HANDSHAKE_MS = 5_000  # that a connection has to show its key; strangers hold a descriptor for so long

log = structlog.get_logger()


class ZmqTransport:
    """Sockets of one process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.context = zmq.Context()
        self.keys = load_keys(settings.runtime_path)
        self._key_file = KeyFile(settings.runtime_path, self.keys)
        self._guard = KeyGuard(self.context, self.keys)
        self._spares = Spares(NUM_SPARES)
        self._inboxes: list[ZmqInbox] = []

    @property
    def scheduler_address(self) -> str:
        return f"tcp://{self.settings.scheduler_host}:{self.settings.scheduler_port}"

    def bind(self, name: str, union: Any) -> Inbox[Any]:
        """Bind this process's inbox; the scheduler's address is well known, others are announced."""
        s = self.settings
        socket = self.pull_socket()
        if name == SCHEDULER:
            socket.bind(f"tcp://*:{s.scheduler_port}")
            self._key_file.is_schedulers = True
            inbox = ZmqInbox(self.scheduler_address, union, socket, self._spares)
        elif s.advertise_host:
            port = socket.bind_to_random_port("tcp://*")
            inbox = ZmqInbox(f"tcp://{s.advertise_host}:{port}", union, socket, self._spares)
        else:
            port = socket.bind_to_random_port("tcp://*")
            way = Way(s.scheduler_host)
            inbox = ZmqInbox(f"tcp://{way.begin}:{port}", union, socket, self._spares, way)
        self._inboxes.append(inbox)
        return inbox

    def pull_socket(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.keys.serve(socket)
        return socket

    def outbox(self) -> ZmqOutbox:
        return ZmqOutbox(self.context, self.keys, int(1000 * self.settings.heartbeat_timeout), self._spares)

    def keep(self) -> str:
        return self._key_file.keep()

    def close(self) -> None:
        for inbox in self._inboxes:  # the event loop must not watch a socket that is gone
            inbox.close()
        self._guard.stop()
        self._spares.close()
        self.context.destroy(linger=LINGER_MS)


class ZmqInbox(Inbox[Any]):
    """Reads the socket through the event loop's file-descriptor watch; ZeroMQ's descriptor is edge-triggered,
    so every wake-up drains the socket."""

    def __init__(
        self, address: str, union: Any, socket: zmq.Socket[bytes], spares: Spares, way: Way | None = None
    ) -> None:
        """`way`: where it is known, the address follows the host that it begins at."""
        super().__init__(address, union)
        self._socket = socket
        self._way = way
        self._loop = asyncio.get_running_loop()
        self._rests = ListenerRests(socket, spares)
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

    def readdress(self) -> bool:
        if self._way is None or not self._way.has_moved():
            return False
        self.address = f"tcp://{self._way.begin}:{self.address.rpartition(':')[2]}"
        return True

    @property
    def is_cut_off(self) -> bool:
        return self._way is not None and self._way.is_cut

    def close(self) -> None:
        if not self._socket.closed:
            self._rests.stop()
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()


class ListenerRests:
    """Takes a socket's listener away for a while when this process has no descriptor for another connection.

    ZeroMQ itself would try again at once and for ever, with all of its thread's time.  Connections that exist go on.
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


class ZmqOutbox:
    """One connected PUSH socket per destination.

    After a cut, or when the other host has another address, a connection looks well and leads nowhere, for a quarter
    of an hour by TCP's own patience.  Here it is made anew once nothing was acknowledged for `patience_ms`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: Keys,
        patience_ms: int,
        spares: Spares,
    ) -> None:
        self._spares = spares
        self._num_rests = 0
        self._waiting: dict[str, list[bytes]] = {}  # for a socket, while there is no descriptor for one
        self._retry_at = 0.0
        self._context = context
        self._keys = keys
        self._patience_ms = patience_ms
        self.on_gone: Callable[[str], None] | None = None
        self._watches: dict[str, Watch] = {}
        self._num_refused = 0
        self._sockets: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()
        self._pending = PendingFrames()

    def send(self, address: str, message: Message) -> None:
        self._pending.add(address, message)

    def flush(self) -> None:
        for address, frames in self._pending.take().items():
            if address in self._waiting:
                self._waiting[address] += frames
            else:
                self._send(address, frames)
        now = time.monotonic()
        if now < self._retry_at:
            return
        self._retry_at = now + REST_SECONDS
        self._spares.refill()
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for address, frames in waiting.items():
                self._send(address, frames)

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

    def forget(self, address: str) -> None:
        self._pending.drop(address)
        self._waiting.pop(address, None)
        if address in self._sockets:
            self._close(address, linger=0)

    def close(self) -> None:
        self.flush()
        for address in list(self._sockets):
            self._close(address, linger=LINGER_MS)

    def _close(self, address: str, linger: int) -> None:
        if watch := self._watches.pop(address, None):
            watch.stop()
        self._sockets.pop(address).close(linger=linger)

    def _watch(self, address: str, socket: zmq.Socket[bytes]) -> None:
        """Tell `on_gone`, where there is one.  Of too many, those used last are left to heartbeats."""
        if (on_gone := self.on_gone) is not None and len(self._watches) < MAX_WATCHED:
            self._watches[address] = Watch(socket, lambda: on_gone(address))

    def _refuse(self, address: str, reason: str) -> None:
        self._num_refused += 1
        if worth_a_line(self._num_refused):
            log.warning("address_refused", address=address[:MAX_SHOWN], reason=reason, num_refused=self._num_refused)

    def _socket(self, address: str) -> zmq.Socket[bytes] | None:
        """The socket to a destination; None where none can be.  Of too many, that used least lately goes."""
        if address in self._sockets:
            self._sockets.move_to_end(address)
            return self._sockets[address]
        if not ADDRESS.fullmatch(address):
            self._refuse(address, "it is none")
            return None
        socket = self._opened(address)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self._sockets[address] = socket
            self._close(address, linger=0)
            self._refuse(address, str(error))
            return None
        self._sockets[address] = socket
        if len(self._sockets) > MAX_DESTINATIONS:
            self._close(next(iter(self._sockets)), linger=0)
        return socket

    def _opened(self, address: str) -> zmq.Socket[bytes]:
        """A socket that is not connected yet, and its watch.  Raises OSError where there are no descriptors for it."""
        self._spares.make_room(ROOM)
        try:
            socket = self._context.socket(zmq.PUSH)
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error
        try:
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.TCP_MAXRT, self._patience_ms)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, self._patience_ms)
            self._keys.connect(socket)
            self._watch(address, socket)  # before it connects, so that no event is missed
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise OSError(error.errno, str(error)) from error
        return socket


class Way:
    """The way to the scheduler's host: at its begin others reach this one.

    A container that is taken from its network and put back has another address there; the way, asked again and again,
    tells.  It costs no packet and, after the first time, no look-up of a name.
    """

    def __init__(self, host: str) -> None:
        """Raises ConfigError where the host's name leads nowhere in `NAME_SECONDS`."""
        self.is_cut = False
        self._end = resolve(host)
        begin = self._look()
        if not begin:
            raise ConfigError(f"no way leads to the scheduler's host {host!r}")
        self.begin = begin

    def has_moved(self) -> bool:
        """Look again.  False where it begins where it did, and where at present there is none."""
        now = self._look()
        self.is_cut = not now
        if now in ("", self.begin):
            return False
        self.begin = now
        return True

    def _look(self) -> str:
        try:
            with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
                probe.connect((self._end, 1))
                return str(probe.getsockname()[0])
        except OSError:
            return ""


def resolve(host: str) -> str:
    """The IPv4 address behind a name, waited for: where the scheduler is just being replaced there is none."""
    deadline = time.monotonic() + NAME_SECONDS
    while True:
        try:
            return sockets.gethostbyname(host)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"no way leads to the scheduler's host {host!r}: {error}") from error
            time.sleep(NAME_POLL)
