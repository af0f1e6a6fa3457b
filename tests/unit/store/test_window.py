"""Blocks through memory that two processes map: no slot is written before it is read, and neither side can take it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from services.store.arena import BlockArena
from shared.data_link import window
from shared.data_link.addresses import ENDING, TCP, UNIX, listening_at, listening_at_port, listening_near
from shared.data_link.client import CorruptBlockError, DataLinks
from shared.data_link.frames import (
    CHALLENGE_BYTES,
    DONE,
    GET,
    MAGIC,
    BlockRequest,
    checksum,
    group_size,
    proof,
    read_checksums,
    read_count,
    receive,
)
from shared.data_link.server import BlockServer
from shared.data_link.window import NUM_SLOTS, READY, receive_window
from shared.errors import ProtocolError

SECRET, SPACE, SIZE = secrets.token_bytes(32), b"s" * 16, 300_000
NAMES = [index.to_bytes(16, "big") for index in range((NUM_SLOTS + 3) * group_size(SIZE) + 1)]


def block(index: int) -> bytes:
    return index.to_bytes(4, "big") * (SIZE // 4)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, BlockArena, DataLinks]]:
    """More blocks than a window has room for."""
    arena, path = BlockArena(1 << 25), tmp_path / f"s{ENDING}"
    for index, name in enumerate(NAMES):
        assert arena.keep(SPACE, name, (checksum(block(index)), block(index)))
    server, links = BlockServer([listening_at(path)], SECRET, arena), DataLinks(tmp_path)
    yield f"{UNIX}{path}", arena, links
    links.close()
    server.close()


def fetched(links: DataLinks, address: str, names: Sequence[bytes]) -> list[bytes]:
    places = [bytearray(SIZE) for _ in names]
    count = links.get(address, SECRET, SPACE, names, [memoryview(place) for place in places])
    return [bytes(place) for place in places[:count]]


def test_more_blocks_than_there_is_memory_for_pass_in_turn(served: tuple[str, BlockArena, DataLinks]) -> None:
    address, arena, links = served
    for count in (len(NAMES), 1, 2 * group_size(SIZE)):
        assert fetched(links, address, NAMES[:count]) == [block(index) for index in range(count)]
    arena.drop([SPACE + NAMES[7]])
    assert fetched(links, address, NAMES) == [block(index) for index in range(7)]
    assert fetched(links, address, NAMES[8:]) == [block(index) for index in range(8, len(NAMES))]


def test_blocks_too_large_for_the_memory_pass_the_socket(
    served: tuple[str, BlockArena, DataLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "WINDOW_BYTES", 2 * SIZE)
    address, _, links = served
    assert fetched(links, address, NAMES[:9]) == [block(index) for index in range(9)]


def test_a_slot_is_written_again_only_when_it_was_read(served: tuple[str, BlockArena, DataLinks]) -> None:
    address, _, _ = served
    size = group_size(SIZE)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address.removeprefix(UNIX))
        link.sendall(proof(SECRET, bytes(receive(link, len(MAGIC) + CHALLENGE_BYTES)[len(MAGIC) :])))
        memory = receive_window(link)
        assert memory is not None
        slots = memory.slots(SIZE)
        link.sendall(BlockRequest(GET, SIZE, SPACE, NAMES).encode())
        for _ in slots:
            assert len(read_checksums(link, read_count(link, size))) == size
        link.settimeout(0.1)
        with pytest.raises(TimeoutError):
            link.recv(1)
        assert [bytes(slot[:SIZE]) for slot in slots] == [block(index * size) for index in range(len(slots))]
        link.settimeout(10)
        link.sendall(DONE)
        assert read_count(link, size) == size, "the first one has new blocks now"
        assert bytes(slots[0][:SIZE]) == block(len(slots) * size)
        with pytest.raises(TypeError):
            slots[1][0] = 1


def test_a_block_that_changed_on_its_way_is_found_and_the_link_made_anew(
    served: tuple[str, BlockArena, DataLinks],
) -> None:
    address, arena, links = served
    arena._blocks[SPACE + NAMES[20]] = checksum(block(20)), block(21)
    with pytest.raises(CorruptBlockError):
        fetched(links, address, NAMES)
    assert fetched(links, address, NAMES[:20]) == [block(index) for index in range(20)]


def test_who_is_on_the_same_host_is_found_by_the_secret(tmp_path: Path) -> None:
    """Behind a port too, whatever the hosts are called; without that name it is reached over TCP."""
    arena = BlockArena(1 << 20)
    assert arena.keep(SPACE, NAMES[0], (checksum(block(0)), block(0)))
    for is_near in (True, False):
        listener = listening_at_port("127.0.0.1")
        address = f"{TCP}127.0.0.1:{listener.getsockname()[1]}"
        server = BlockServer([listener, *([listening_near(SECRET)] if is_near else [])], SECRET, arena)
        links = DataLinks(tmp_path)
        assert fetched(links, address, NAMES[:1]) == [block(0)]
        link, memory = links._links[address]
        assert (link.family == socket.AF_UNIX, memory is not None) == (is_near, is_near)
        links.close()
        server.close()


def test_memory_that_could_shrink_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, window.WINDOW_BYTES)
        socket.send_fds(ours, [READY], [descriptor])
        os.close(descriptor)
        with pytest.raises(ProtocolError):
            receive_window(theirs)
