"""Addresses across hosts: `tcp://`, encrypted with CURVE keys that lie in the runtime directory."""

from __future__ import annotations

import re
from typing import Any

import zmq

from shared.config import DeploymentSettings
from shared.processes.descriptors import Spares
from shared.transport.addresses import SCHEDULER
from shared.transport.inbox import ZmqInbox
from shared.transport.keys import KeyFile, KeyGuard, load_keys
from shared.transport.listener_rests import ListenerRests
from shared.transport.way import Way

ADDRESS = re.compile(r"tcp://(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
HANDSHAKE_MS = 5_000  # that a connection has to show its key; strangers hold a descriptor for so long
RETURN_SECONDS = 0.4  # in which ZeroMQ, which tries every tenth of a second, reaches a process that is still there


class TcpAddresses:
    """After a cut, or when the other host has another address, a connection looks well and leads nowhere, for a quarter
    of an hour by TCP's own patience.  Here it is made anew once nothing was acknowledged for `heartbeat_timeout`.
    """

    return_seconds = RETURN_SECONDS
    is_vacant = None

    def __init__(self, settings: DeploymentSettings, context: zmq.Context[zmq.Socket[bytes]], spares: Spares) -> None:
        self._settings = settings
        self._spares = spares
        self._keys = load_keys(settings.runtime_path)
        self._key_file = KeyFile(settings.runtime_path, self._keys)
        self._guard = KeyGuard(context, self._keys)
        self._patience_ms = int(1000 * settings.heartbeat_timeout)
        self.scheduler = f"tcp://{settings.scheduler_host}:{settings.scheduler_port}"

    def bind(self, name: str, union: Any, socket: zmq.Socket[bytes]) -> ZmqInbox:
        s = self._settings
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._keys.serve(socket)
        if name == SCHEDULER:
            socket.bind(f"tcp://*:{s.scheduler_port}")
            self._key_file.is_schedulers = True
            return TcpInbox(self.scheduler, union, socket, self._spares)
        port = socket.bind_to_random_port("tcp://*")
        if s.advertise_host:
            return TcpInbox(f"tcp://{s.advertise_host}:{port}", union, socket, self._spares)
        way = Way(s.scheduler_host)
        return TcpInbox(f"tcp://{way.begin}:{port}", union, socket, self._spares, way)

    def objection(self, address: str) -> str:
        return "" if ADDRESS.fullmatch(address) else "it is not a tcp address"

    def prepare(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.TCP_MAXRT, self._patience_ms)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, self._patience_ms)
        self._keys.connect(socket)

    def keep(self) -> str:
        return self._key_file.keep()

    def close(self) -> None:
        self._guard.stop()


class TcpInbox(ZmqInbox):
    """Listens at a port."""

    def __init__(
        self, address: str, union: Any, socket: zmq.Socket[bytes], spares: Spares, way: Way | None = None
    ) -> None:
        """`way`: where it is known, the address follows the host that it begins at."""
        super().__init__(address, union, socket)
        self._way = way
        self._rests = ListenerRests(socket, spares)

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
        super().close()
