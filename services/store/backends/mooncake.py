"""Mooncake's store as a backend: its master knows where values lie, its clients give memory and move the bytes.

`mooncake://HOST:PORT` is the master's address; clients find each other by its handshake, without a metadata server, and
send bytes over TCP.  With `?segment=1GiB` each store gives so much of its memory to Mooncake, which then forgets what
lay there when that store ends; without, `mooncake_client` processes have to give some.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from services.store.backends.interface import BackendAddress, BackendError, Value
from shared.errors import ConfigError

BUFFER_BYTES = 64 << 20  # of a client, through which values pass
SECONDS = 2.0  # that connecting to the master may take
HANDSHAKE = "P2PHANDSHAKE"  # in place of the address of a metadata server


class MooncakeBackend:
    """One client.  It connects again by itself when the master comes back."""

    def __init__(self, master: tuple[str, int], segment_bytes: int) -> None:
        """Raises BackendError, or OSError where nothing listens at the master's address."""
        socket.create_connection(master, SECONDS).close()  # the library's own attempt stops this process for 90 s
        os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "true")
        self._store = library().MooncakeDistributedStore()
        address = "{}:{}".format(*master)
        code = self._store.setup(own_host(master), HANDSHAKE, segment_bytes, BUFFER_BYTES, "tcp", "", address)
        if code:
            raise BackendError(f"Mooncake's master at {address} gave the code {code}")

    def put(self, name: str, parts: Sequence[Value]) -> bool:
        return self._store.put_parts(name_in(name), *parts) == 0  # type: ignore[no-any-return]

    def get(self, names: Sequence[str], size: int) -> list[Value | None]:
        self.has(names)  # which says where the master does not answer
        most, values = max(1, BUFFER_BYTES // 2 // size), list[Value | None]()
        for start in range(0, len(names), most):
            some = [name_in(name) for name in names[start : start + most]]
            values += [value or None for value in self._store.get_batch(some)]
        return values

    def has(self, names: Sequence[str]) -> list[bool]:
        answers = self._store.batch_is_exist([name_in(name) for name in names])
        if min(answers, default=0) < 0:
            raise BackendError("Mooncake's master does not answer")
        return [answer == 1 for answer in answers]

    def drop(self, name: str) -> None:
        self._store.remove(name_in(name), force=True)

    def close(self) -> None:
        self._store.close()


def mooncake_at(master: tuple[str, int], segment_bytes: int) -> BackendAddress:
    """Raises ConfigError where the package is not installed, or cannot be loaded."""
    library()
    return BackendAddress(
        reader=lambda: MooncakeBackend(master, 0), writer=lambda: MooncakeBackend(master, segment_bytes)
    )


def library() -> Any:
    """Raises ConfigError."""
    try:
        from mooncake import store
    except ImportError as error:
        raise ConfigError(f"store_backend mooncake needs the package of pageant[mooncake]: {error}") from error
    return store


def name_in(name: str) -> str:
    """Of a block, among what others may keep at the same master."""
    return f"pageant-{name}"


def own_host(peer: tuple[str, int]) -> str:
    """The address of this host on the way to another.  Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])
