"""An LMCache server as a backend: `lmcache_server HOST PORT`, which LMCache's connector reaches as `lm://HOST:PORT`.

    client -> server   9 integers (command, bytes, format, type, location, 4 of a shape), a key of 150 bytes
                       with PUT the bytes follow
    server -> client   9 integers (code, bytes, format, type, 4 of a shape, location)
                       with GET the bytes follow; to PUT there is no answer

Integers have 4 bytes, in the order of an x86.  A block is kept as a binary value of bytes.  No package is needed: the
server runs in an environment of its own.  It has no limit and no command to drop a value, and asks no client for a key.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from functools import partial

from services.store.backends.interface import BackendAddress, BackendError, Value
from services.store.backends.sealed import SEAL_BYTES
from shared.data_link.addresses import prepare
from shared.data_link.frames import MAX_BLOCK_BYTES, receive

SECONDS = 2.0  # that one call of the socket may take
MOST_AT_ONCE = 64  # requests that are sent before their answers are read: they fit into the sockets' buffers
PUT, GET, EXIST = 1, 2, 3
SUCCESS, FAIL = 200, 400
BINARY, UINT8 = 4, 6  # a format and a type
DROPPED = b"\0"  # a value in the place of one that was dropped: it is shorter than any other

_REQUEST = struct.Struct("<9i150s")
_ANSWER = struct.Struct("<9i")


class LMCacheBackend:
    """One connection to the server."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError."""
        self._link = socket.create_connection((host, port), SECONDS)
        prepare(self._link)

    def put(self, name: str, parts: Sequence[Value]) -> bool:
        """The server says nothing to a PUT, so it is asked whether the value is there."""
        self._link.sendall(request(PUT, name, sum(map(len, parts))))
        for part in parts:
            self._link.sendall(part)
        return self.has([name]) == [True]

    def get(self, names: Sequence[str], size: int) -> list[Value | None]:
        values: list[Value | None] = []
        for is_there, num_bytes in self._ask(GET, names):
            value = receive(self._link, num_bytes) if is_there else None
            values.append(None if num_bytes == len(DROPPED) else value)
        return values

    def has(self, names: Sequence[str]) -> list[bool]:
        """Also where a value was dropped: the server does not say how long it is."""
        return [is_there for is_there, _ in self._ask(EXIST, names)]

    def drop(self, name: str) -> None:
        """The server has no command for it, but what is put under a name replaces what was there."""
        self.put(name, [DROPPED])

    def close(self) -> None:
        self._link.close()

    def _ask(self, command: int, names: Sequence[str]) -> Iterator[tuple[bool, int]]:
        """For each name whether it is there, and how many bytes follow."""
        for start in range(0, len(names), MOST_AT_ONCE):
            some = names[start : start + MOST_AT_ONCE]
            self._link.sendall(b"".join(request(command, name) for name in some))
            for _ in some:
                code, num_bytes, *_ = _ANSWER.unpack(receive(self._link, _ANSWER.size))
                if code not in (SUCCESS, FAIL) or not 0 <= num_bytes <= SEAL_BYTES + MAX_BLOCK_BYTES:
                    raise BackendError(f"it is no LMCache server: an answer with code {code} and {num_bytes} bytes")
                yield code == SUCCESS, num_bytes


def lmcache_at(host: str, port: int) -> BackendAddress:
    connect = partial(LMCacheBackend, host, port)
    return BackendAddress(reader=connect, writer=connect)


def request(command: int, name: str, num_bytes: int = 0) -> bytes:
    """A key is model@world size@worker@hash@type."""
    key = f"pageant@1@0@{name}@uint8".encode().ljust(150)
    return _REQUEST.pack(command, num_bytes, BINARY, UINT8, 0, num_bytes, 0, 0, 0, key)
