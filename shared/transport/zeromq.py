"""PUSH to PULL over ipc:// on one host or CURVE-encrypted tcp:// across hosts.

One socket is bound per process (its inbox); every destination gets a socket that is connected once.  Sends never
block: memory is bounded by admission at the gateways, so the high-water marks are off.  Receiving reads ahead
without waiting until the socket is empty, so that one wake-up serves everything that has arrived.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket as sockets
import stat
from pathlib import Path
from typing import IO, Any

import zmq

from shared.config import Settings
from shared.errors import ConfigError
from shared.messages import Message
from shared.messages.codec import MAX_MESSAGE_BYTES
from shared.transport.keys import KeyGuard, Keys, load_keys
from shared.transport.link import Inbox, PendingFrames

LINGER_MS = 500
MAX_BATCH = 4096
SCHEDULER = "scheduler"
SCHEDULER_SOCKET = f"{SCHEDULER}.sock"
MAX_IPC_ADDRESS = 107  # sockaddr_un holds 108 bytes with the final zero


class ZmqTransport:
    """Sockets of one process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.context = zmq.Context()
        self.keys: Keys | None = None
        self._guard: KeyGuard | None = None
        self._claim: IO[str] | None = None
        self._inboxes: list[ZmqInbox] = []
        if settings.transport == "ipc":
            make_private(settings.runtime_path)
        else:
            self.keys = load_keys(settings.runtime_path)
            self._guard = KeyGuard(self.context, self.keys)

    @property
    def scheduler_address(self) -> str:
        s = self.settings
        if s.transport == "ipc":
            return f"ipc://{s.runtime_path}/{SCHEDULER_SOCKET}"
        return f"tcp://{s.scheduler_host}:{s.scheduler_port}"

    def bind(self, name: str, union: Any) -> Inbox[Any]:
        """Bind this process's inbox; the scheduler's address is well known, others are announced."""
        s = self.settings
        address = f"ipc://{s.runtime_path}/{name}.sock"
        if s.transport == "ipc" and len(address) > MAX_IPC_ADDRESS:
            raise ConfigError(f"runtime_dir is too long for a socket's name: {s.runtime_path}")
        if s.transport == "ipc" and name == SCHEDULER:
            self._claim = claim(s.runtime_path)
        socket = self.pull_socket()
        if s.transport == "ipc":
            socket.bind(address)
        elif name == SCHEDULER:
            socket.bind(f"tcp://*:{s.scheduler_port}")
            address = self.scheduler_address
        else:
            port = socket.bind_to_random_port("tcp://*")
            address = f"tcp://{s.advertise_host or own_address(s.scheduler_host)}:{port}"
        inbox = ZmqInbox(address, union, socket)
        self._inboxes.append(inbox)
        return inbox

    def pull_socket(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if self.keys is not None:
            self.keys.serve(socket)
        return socket

    def outbox(self) -> ZmqOutbox:
        return ZmqOutbox(self.context, self.keys)

    def close(self) -> None:
        for inbox in self._inboxes:  # the event loop must not watch a socket that is gone
            inbox.close()
        if self._guard is not None:
            self._guard.stop()
        self.context.destroy(linger=LINGER_MS)
        if self._claim is not None:
            self._claim.close()


class ZmqInbox(Inbox[Any]):
    """Reads the socket through the event loop's file-descriptor watch; ZeroMQ's descriptor is edge-triggered,
    so every wake-up drains the socket."""

    def __init__(self, address: str, union: Any, socket: zmq.Socket[bytes]) -> None:
        super().__init__(address, union)
        self._socket = socket
        self._loop = asyncio.get_running_loop()
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

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            if self.address.startswith("ipc://") and not self.address.endswith(f"/{SCHEDULER_SOCKET}"):
                # Names of instances are used once.  The scheduler's may be its successor's already.
                Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)


class ZmqOutbox:
    """One connected PUSH socket per destination."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys | None) -> None:
        self._context = context
        self._keys = keys
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._pending = PendingFrames()

    def send(self, address: str, message: Message) -> None:
        self._pending.add(address, message)

    def flush(self) -> None:
        for address, frames in self._pending.take().items():
            self._socket(address).send_multipart(frames, zmq.NOBLOCK)

    def forget(self, address: str) -> None:
        self._pending.drop(address)
        if socket := self._sockets.pop(address, None):
            socket.close(linger=0)

    def close(self) -> None:
        self.flush()
        for socket in self._sockets.values():
            socket.close(linger=LINGER_MS)
        self._sockets.clear()

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._sockets:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)
            if self._keys is not None and address.startswith("tcp://"):
                self._keys.connect(socket)
            socket.connect(address)
            self._sockets[address] = socket
        return self._sockets[address]


def claim(directory: Path) -> IO[str]:
    """Hold a deployment's directory for its one scheduler, until this file is closed or the process ends.

    ZeroMQ would take the socket away from a scheduler that is there already.  Raises ConfigError where one is.
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


def make_private(directory: Path) -> None:
    """Create a directory that only this user can enter.  Raises ConfigError where another user owns it."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(f"runtime_dir {directory} belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        directory.chmod(0o700)


def own_address(scheduler_host: str) -> str:
    """This host's address on the network that leads to the scheduler; nothing is sent to find it."""
    try:
        with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
            probe.connect((scheduler_host, 1))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"no way leads to the scheduler's host {scheduler_host!r}: {error}") from error
