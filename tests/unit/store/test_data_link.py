"""The data link: who may use it, what it refuses, and that no block arrives otherwise than it was sent."""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import msgspec
import pytest

from services.store.arena import BlockArena
from services.worker.blocks.mover import patience
from shared.data_link import client
from shared.data_link.addresses import (
    ENDING,
    TCP,
    UNIX,
    listening_at,
    listening_at_port,
    listening_near,
    objection,
    prepare,
)
from shared.data_link.client import CorruptBlockError, DataLinks
from shared.data_link.frames import CHALLENGE_BYTES, MAGIC, MAX_BLOCKS, PUT, BlockRequest, proof
from shared.data_link.server import BlockServer
from shared.data_link.window import READY
from shared.errors import ProtocolError
from shared.messages import FetchBlocks

SECRET, SPACE = secrets.token_bytes(32), b"s" * 16
NAMES = [bytes([index]) * 16 for index in range(4)]
BLOCKS = [bytes([index]) * 1000 for index in range(4)]


@pytest.fixture(params=["unix", "tcp", "near"])
def served(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, BlockArena, DataLinks]]:
    """Through memory; through a socket; and at a port of the same host, so through memory too."""
    arena, path = BlockArena(1 << 20), tmp_path / f"s{ENDING}"
    listeners = [listening_at(path) if request.param == "unix" else listening_at_port("127.0.0.1")]
    address = f"{UNIX}{path}" if request.param == "unix" else f"{TCP}127.0.0.1:{listeners[0].getsockname()[1]}"
    if request.param == "near":
        monkeypatch.setattr(f"{__name__}.SECRET", secrets.token_bytes(32))  # two may not listen under one name
        listeners.append(listening_near(SECRET))
    server, links = BlockServer(listeners, SECRET, arena), DataLinks(tmp_path)
    yield address, arena, links
    links.close()
    server.close()


def places(count: int) -> list[memoryview]:
    return [memoryview(bytearray(1000)) for _ in range(count)]


def test_blocks_come_back_as_they_were_given(served: tuple[str, BlockArena, DataLinks]) -> None:
    address, _, links = served
    assert links.put(address, SECRET, SPACE, NAMES[:3], BLOCKS[:3]) == 3
    found = places(4)
    assert links.get(address, SECRET, SPACE, NAMES, found) == 3
    assert [bytes(place) for place in found[:3]] == BLOCKS[:3]
    assert links.get(address, SECRET, SPACE, NAMES[3:], places(1)) == 0


def test_a_block_that_changed_is_found(
    served: tuple[str, BlockArena, DataLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, arena, links = served
    links.put(address, SECRET, SPACE, NAMES, BLOCKS)
    memoryview(arena._blocks[SPACE + NAMES[1]][1])[500] ^= 1
    with pytest.raises(CorruptBlockError):
        links.get(address, SECRET, SPACE, NAMES, places(4))
    monkeypatch.setattr(client, "checksum", lambda block: 1)  # as if the way to the store had changed them
    assert links.put(address, SECRET, SPACE, NAMES, BLOCKS) == 0


def test_blocks_that_pass_through_memory_are_copied_and_checked_as_the_caller_wants(
    served: tuple[str, BlockArena, DataLinks], tmp_path: Path
) -> None:
    address, _, links = served
    links.put(address, SECRET, SPACE, NAMES, BLOCKS)
    sums: list[int] = []

    def copy(place: memoryview, source: memoryview) -> int:
        place[:] = source
        sums.append(crc32(source) if len(sums) < 2 else 0)
        return sums[-1]

    found, own = places(4), DataLinks(tmp_path, copy=copy)
    if own._connection(address, SECRET)[1] is None:  # through a socket: nothing is copied
        assert own.get(address, SECRET, SPACE, NAMES, found) == 4
        assert not sums
    else:
        with pytest.raises(CorruptBlockError):
            own.get(address, SECRET, SPACE, NAMES, found)
        assert len(sums) == 3
        assert [bytes(place) for place in found[:2]] == BLOCKS[:2]
    own.close()


def test_a_stranger_is_not_let_in(served: tuple[str, BlockArena, DataLinks]) -> None:
    address, arena, links = served
    with pytest.raises((OSError, ProtocolError)):
        links.put(address, b"guess" * 5, SPACE, NAMES, BLOCKS)
    assert len(arena) == 0


def test_a_request_beyond_the_limits_ends_its_connection_alone(served: tuple[str, BlockArena, DataLinks]) -> None:
    address, _, links = served
    kind = socket.AF_UNIX if address.startswith(UNIX) else socket.AF_INET
    with socket.socket(kind) as link:
        where = address.partition(":")[2]
        link.connect(where if kind == socket.AF_UNIX else ("127.0.0.1", int(where.rpartition(":")[2])))
        greeting = link.recv(len(MAGIC) + CHALLENGE_BYTES)
        link.sendall(proof(SECRET, greeting[len(MAGIC) :]))
        assert link.recv(1) == READY
        link.sendall(BlockRequest(PUT, 1000, SPACE, [NAMES[0]] * (MAX_BLOCKS + 1)).encode())
        link.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert link.recv(1) == b""
    assert links.put(address, SECRET, SPACE, NAMES, BLOCKS) == 4


def test_only_addresses_of_the_deployment_are_connected_to(tmp_path: Path) -> None:
    assert not objection(f"{UNIX}{tmp_path}/store-1{ENDING}", tmp_path)
    assert not objection("tcp:10.0.0.2:5000", tmp_path)
    for wrong in (
        f"{UNIX}/etc/store{ENDING}",
        f"{UNIX}{tmp_path}/a.sock",
        f"{UNIX}{tmp_path}/a/b{ENDING}",
        "tcp:x",
        "tcp:10.0.0.2:65536",
        "tcp:10.0.0.2:99999",
        "",
    ):
        assert objection(wrong, tmp_path), wrong
        with pytest.raises(ProtocolError):
            DataLinks(tmp_path).put(wrong, SECRET, SPACE, NAMES, BLOCKS)


def test_what_takes_longer_than_there_is_time_for_is_given_up(served: tuple[str, BlockArena, DataLinks]) -> None:
    """A store that stands still in the middle; the link is made anew for the next request."""
    address, arena, links = served
    assert links.put(address, SECRET, SPACE, NAMES, BLOCKS) == 4
    with arena._lock:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            links.get(address, SECRET, SPACE, NAMES, places(4), begun + 0.05)
        assert time.monotonic() - begun < client.SECONDS
    with pytest.raises(TimeoutError):
        links.get(address, SECRET, SPACE, NAMES, places(4), time.monotonic() - 1.0)
    assert links.get(address, SECRET, SPACE, NAMES, places(4), time.monotonic() + 10.0) == 4


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_fetch_that_stalls_anywhere_costs_little_more_than_computing(share: float) -> None:
    order = FetchBlocks(1, 1, 0, "s", NAMES * 25, list(range(100)), [1] * 100, seconds=2.0)
    done = int(share * 100)
    spent = patience(order, done + 1, 100)  # until the piece is given up that has not come
    computing_the_rest = order.seconds * (100 - done) / 100
    assert spent + computing_the_rest <= 1.06 * order.seconds
    assert patience(msgspec.structs.replace(order, seconds=0.0), 1, 100) == math.inf


def test_a_host_that_vanishes_is_noticed() -> None:
    with socket.socket(socket.AF_INET) as over_tcp, socket.socket(socket.AF_UNIX) as local:
        prepare(over_tcp)
        prepare(local)
        assert over_tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        probes = [over_tcp.getsockopt(socket.IPPROTO_TCP, one) for one in (socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]
        assert over_tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + probes[0] * probes[1] <= 60
