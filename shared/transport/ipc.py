"""Addresses of one host: sockets in the deployment's private directory, known by their inodes.

The listening sockets are made here and handed to ZeroMQ, which then unlinks no path: neither when it binds nor when it
closes, when the path may be a successor's.

Over ipc:// libzmq (4.3.5, `ipc_listener_t::accept`) aborts the process where it finds no descriptor for a connection.
So no process may fill its table: services that take connections from clients leave descriptors to the bus.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import zmq

from shared.config import DeploymentSettings
from shared.errors import ConfigError
from shared.transport.addresses import SCHEDULER
from shared.transport.directory import LOCK, answers, claim, fits, identity, is_at, listening, make_private
from shared.transport.inbox import ZmqInbox

SCHEME = "ipc://"
ENDING = ".sock"
OWN_PARENT = "pageant-"  # of the default runtime directory, which is in /tmp
RECONNECT_MS = 25  # ZeroMQ waits for this long, and for a random part of it more


class IpcAddresses:
    """Sockets in one directory, which lets in only its owner: so no keys are needed."""

    return_seconds = 0.0  # since it can be seen at once whether a process listens

    def __init__(self, settings: DeploymentSettings) -> None:
        self._directory = settings.runtime_path
        self._prefix = f"{SCHEME}{self._directory}/"
        self._claim: IO[str] | None = None
        self._inboxes: list[IpcInbox] = []
        self.scheduler = f"{self._prefix}{SCHEDULER}{ENDING}"
        self._enter()

    def _enter(self) -> None:
        if self._directory.parent.name.startswith(OWN_PARENT):
            make_private(self._directory.parent)  # its owner could put another directory in place of ours
        make_private(self._directory)

    def bind(self, name: str, union: Any, socket: zmq.Socket[bytes]) -> ZmqInbox:
        path = self._directory / f"{name}{ENDING}"
        if not fits(str(path)):
            raise ConfigError(f"runtime_dir is too long for a socket's name: {self._directory}")
        if name == SCHEDULER:
            self._claim = claim(self._directory)
            path.unlink(missing_ok=True)  # an earlier life's; with this claim that life is over
        self._inboxes.append(IpcInbox(path, union, socket))
        return self._inboxes[-1]

    def objection(self, address: str) -> str:
        name = address.removeprefix(self._prefix)
        is_ours = name != address and name.endswith(ENDING) and "/" not in name
        return "" if is_ours and fits(address.removeprefix(SCHEME)) else "it is not in the runtime directory"

    def prepare(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)

    def is_vacant(self, address: str) -> bool:
        try:
            return not answers(address.removeprefix(SCHEME))
        except OSError:  # there is no descriptor to find out with
            return False

    def keep(self) -> str:
        """The lock first: the process that holds it may have the scheduler's socket."""
        has_claim = self._claim is None or is_at(self._directory / LOCK, self._claim.fileno())
        missing = [inbox for inbox in self._inboxes if inbox.is_lost]
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
        if self._claim is not None:
            self._claim.close()


class IpcInbox(ZmqInbox):
    """Listens at a path."""

    def __init__(self, path: Path, union: Any, socket: zmq.Socket[bytes]) -> None:
        self._path = path
        self._place = listen(socket, path)
        super().__init__(f"{SCHEME}{path}", union, socket)

    @property
    def is_in_place(self) -> bool:
        """Whether a process that connects to our address still comes to us."""
        return self._place is not None and identity(self._path) == self._place

    @property
    def is_lost(self) -> bool:
        return not self._socket.closed and not self.is_in_place

    def renew(self) -> None:
        """Listen at our address again.  Raises OSError where no socket can listen there at present.

        The former listener stays beside the new one, nameless: ZeroMQ would end its connections with it.
        """
        self._path.unlink(missing_ok=True)
        self._place = listen(self._socket, self._path)

    def close(self) -> None:
        if not self._socket.closed:
            super().close()
            if self.is_in_place:  # else it is another process's
                self._path.unlink(missing_ok=True)


def listen(socket: zmq.Socket[bytes], path: Path) -> tuple[int, int] | None:
    """Let a socket listen at a path where there is none; returns the path's identity.  Raises OSError."""
    with listening(path) as listener:
        socket.setsockopt(zmq.USE_FD, listener.fileno())
        socket.bind(f"{SCHEME}{path}")
        listener.detach()  # it is ZeroMQ's now
    return identity(path)
