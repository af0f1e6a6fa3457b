"""An LMCache server as a backend, as far as its protocol goes: what was dropped there is not read again."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from services.store.arena import OVERHEAD, BlockArena
from services.store.backends.blocks import BackendBlocks
from services.store.backends.lmcache import (
    _ANSWER,
    _REQUEST,
    BINARY,
    DROPPED,
    FAIL,
    GET,
    PUT,
    SUCCESS,
    UINT8,
    lmcache_at,
)
from shared.data_link.frames import receive
from tests.unit.store.test_backend import KEYS, NAMES, SIZE, SPACE, block, fill, found, looked_up, until, written


class FakeServer:
    """As `lmcache_server`: it knows PUT, GET and EXIST, and forgets nothing."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                end, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        with end, contextlib.suppress(OSError):  # the client has left
            while True:
                command, num_bytes, *_, key = _REQUEST.unpack(receive(end, _REQUEST.size))
                if command == PUT:
                    self.values[key] = bytes(receive(end, num_bytes))
                    continue
                value = self.values.get(key)
                data = value if command == GET and value is not None else b""
                code = FAIL if value is None else SUCCESS
                end.sendall(_ANSWER.pack(code, len(data), BINARY, UINT8, len(data), 0, 0, 0, 0) + data)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    made = FakeServer()
    yield made
    made.close()


@pytest.fixture
def stores(server: FakeServer) -> Iterator[list[BlockArena]]:
    made = [BackendBlocks(lmcache_at("127.0.0.1", server.port), 1 << 20, 20.0) for _ in range(4)]
    yield [BlockArena(20 * (SIZE + OVERHEAD), backend=backend) for backend in made]
    for backend in made:
        backend.close()


def test_what_was_dropped_is_read_by_no_store_until_it_is_put_again(
    server: FakeServer, stores: list[BlockArena]
) -> None:
    """As a value that is sealed as it should be, and yet is false: a scheduler has found it to be so."""
    first, second, third, fourth = stores
    fill(first, 3)
    written(first)
    looked_up(second, KEYS[:3])
    assert found(second, 3) == 3
    first.drop(KEYS[1:2])
    until(lambda: sorted(map(len, server.values.values()))[0] == len(DROPPED))
    assert looked_up(third, KEYS[:3]) == (set(KEYS[:3]), set()), "the server does not say that it was dropped"
    assert found(third, 3) == 1
    assert KEYS[1] in third.take_changes()[1]
    assert third.backend is not None and third.backend.num_corrupt == 0, "it is a miss"
    third.keep(SPACE, NAMES[1], block(1))
    written(third)
    looked_up(fourth, KEYS[:3])
    assert found(fourth, 3) == 3
