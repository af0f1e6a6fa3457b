"""Blocks in another system: stores share them through it, and whatever it does is a miss that takes no long time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from services.store.arena import OVERHEAD, BlockArena
from services.store.backends import blocks as blocks_module
from services.store.backends.addresses import backend_at
from services.store.backends.blocks import BackendBlocks
from services.store.backends.sealed import SEAL_BYTES
from shared.data_link.frames import checksum
from shared.errors import ConfigError
from tests.unit.store.copied import copied
from tests.unit.store.fake_backend import FakeSystem

SPACE, SIZE = b"s" * 16, 1000
NAMES = [index.to_bytes(16, "big") for index in range(40)]
KEYS = [SPACE + name for name in NAMES]
Opened = Callable[..., BlockArena]


def block(index: int) -> tuple[int, bytearray]:
    data = bytearray(index.to_bytes(4, "big") * (SIZE // 4))
    return checksum(data), data


@pytest.fixture
def system() -> FakeSystem:
    return FakeSystem()


@pytest.fixture
def opened(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Makes stores of this system."""
    monkeypatch.setattr(blocks_module, "REST_SECONDS", 0.0)
    monkeypatch.setattr(blocks_module, "CLOSE_SECONDS", 0.2)
    made: list[BackendBlocks] = []

    def make(in_memory: int = 2, seconds: float = 20.0, max_pending: int = 1 << 20) -> BlockArena:
        made.append(BackendBlocks(system.address, max_pending, seconds))
        return BlockArena(in_memory * (SIZE + OVERHEAD), backend=made[-1])

    yield make
    system.is_open.set()
    for backend in made:
        backend.close()


def fill(arena: BlockArena, count: int) -> None:
    for index in range(count):
        assert arena.keep(SPACE, NAMES[index], block(index))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def written(arena: BlockArena) -> None:
    backend = arena.backend
    assert backend is not None
    until(lambda: not backend._pending and not backend._to_drop)


def found(arena: BlockArena, count: int) -> int:
    """How many of the first blocks are found, each with the bytes that it had."""
    some = copied(arena, SPACE, NAMES[:count], SIZE)
    assert [(wanted, bytes(data)) for wanted, data in some] == [
        (wanted, bytes(data)) for wanted, data in map(block, range(len(some)))
    ]
    return len(some)


def looked_up(arena: BlockArena, keys: list[bytes]) -> tuple[set[bytes], set[bytes]]:
    """What a store says of keys: those that are there, and those that are not."""
    kept: set[bytes] = set()
    dropped: set[bytes] = set()
    arena.take_changes()
    arena.look_up(keys)

    def is_said() -> bool:
        some, others, _ = arena.take_changes()
        kept.update(some)
        dropped.update(others)
        return kept | dropped >= set(keys)

    until(is_said)
    return kept, dropped


def test_what_memory_has_no_more_comes_from_the_backend(opened: Opened, system: FakeSystem) -> None:
    arena = opened()
    fill(arena, 10)
    written(arena)
    kept, dropped, _ = arena.take_changes()
    assert (kept, dropped) == (KEYS[:10], []), "what memory has no more is not gone"
    assert arena.num_bytes <= arena.max_bytes
    assert found(arena, 12) == 10
    assert set(arena.keys()) == set(KEYS[:10])
    assert arena.num_served_from_backend >= 8
    assert len(system.values) == 10


def test_another_store_finds_what_it_looks_for(opened: Opened, system: FakeSystem) -> None:
    one, other = opened(), opened(in_memory=20)
    fill(one, 6)
    written(one)
    assert found(other, 6) == 0 and "get" not in system.calls, "it does not know of them"
    assert looked_up(other, KEYS[:9]) == (set(KEYS[:6]), set(KEYS[6:9]))
    assert found(other, 9) == 6
    num_calls = len(system.calls)
    assert found(other, 6) == 6 and len(system.calls) == num_calls, "they are in memory now"
    assert looked_up(other, KEYS[:6]) == (set(KEYS[:6]), set()) and len(system.calls) == num_calls


def test_a_value_that_is_another_block_or_other_bytes_is_a_miss_and_is_mended(
    opened: Opened, system: FakeSystem
) -> None:
    lies: list[Callable[[str, bytes], bytes]] = [
        lambda name, value: value[:-1] + bytes([value[-1] ^ 1]),
        lambda name, value: value[:SEAL_BYTES],
        lambda name, value: system.values[KEYS[7].hex()],
        lambda name, value: b"",
    ]
    for lie in lies:
        one, other = opened(), opened(in_memory=20)
        fill(one, 8)
        written(one)
        looked_up(other, KEYS[:8])
        system.distort = lambda name, value, lie=lie: lie(name, value) if name == KEYS[3].hex() else value  # type: ignore[misc]
        assert found(other, 8) == 3
        assert KEYS[3] in other.take_changes()[1]
        system.distort = lambda name, value: value
        until(lambda: KEYS[3].hex() not in system.values)  # it is dropped there
        assert found(other, 8) == 3
        other.keep(SPACE, NAMES[3], block(3))
        written(other)
        assert found(opened_with(opened, KEYS[:8]), 8) == 8


def opened_with(opened: Opened, keys: list[bytes]) -> BlockArena:
    arena = opened(in_memory=20)
    looked_up(arena, keys)
    return arena


def test_one_that_is_not_there_costs_what_memory_does_not_hold(opened: Opened, system: FakeSystem) -> None:
    system.is_there = False
    arena = opened()
    for index in range(6):
        arena.keep(SPACE, NAMES[index], block(index))
        written(arena)
    assert dropped_of(arena, 4) == set(KEYS[:4])
    assert found(arena, 6) == 0 and len(copied(arena, SPACE, NAMES[4:6], SIZE)) == 2
    system.is_there = True
    fill(arena, 8)
    written(arena)
    assert found(arena, 8) == 8, "it is there again"
    system.is_there = False
    assert found(arena, 8) == 0
    system.is_there = True
    assert found(arena, 8) == 8, "what it did not give is still known"


def test_one_that_takes_no_more_costs_what_memory_does_not_hold(opened: Opened, system: FakeSystem) -> None:
    system.room = 5
    arena = opened()
    for index in range(10):
        arena.keep(SPACE, NAMES[index], block(index))
        written(arena)
    assert dropped_of(arena, 3) == set(KEYS[5:8])
    assert found(arena, 10) == 5 and len(copied(arena, SPACE, NAMES[8:10], SIZE)) == 2
    assert "close" not in system.calls, "its connection is as good as before"


def test_one_that_stands_still_is_not_waited_for(
    opened: Opened, system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "REST_SECONDS", 100.0)
    arena = opened(seconds=0.05, max_pending=3 * SIZE)
    fill(arena, 3)
    written(arena)
    system.is_open.clear()
    begun = time.monotonic()
    assert found(arena, 3) == 0, "it does not answer"
    for _ in range(100):
        assert found(arena, 3) == 0, "and is not asked again"
        assert arena.keep(SPACE, NAMES[10], block(10))
    assert time.monotonic() - begun < 10
    fill(arena, 40)
    assert arena.backend is not None and arena.backend._pending_bytes <= 3 * SIZE
    assert len(copied(arena, SPACE, NAMES[38:], SIZE)) == 2, "memory goes on"
    assert looked_up(arena, [b"?" * 32]) == (set(), {b"?" * 32}), "nothing is looked for while it rests"


def test_what_is_dropped_is_dropped_there_too(opened: Opened, system: FakeSystem) -> None:
    arena = opened()
    fill(arena, 6)
    written(arena)
    arena.drop(KEYS[:3])
    written(arena)
    until(lambda: len(system.values) == 3)
    assert found(arena, 6) == 0 and len(copied(arena, SPACE, NAMES[3:6], SIZE)) == 3
    assert looked_up(arena, KEYS[:6]) == (set(KEYS[3:6]), set(KEYS[:3]))


def test_what_cannot_be_dropped_at_once_is_dropped_later_and_not_found_meanwhile(
    opened: Opened, system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.store.backends.blocks.REST_SECONDS", 0.2)
    arena = opened()
    fill(arena, 6)
    written(arena)
    until(lambda: len(system.values) == 6)
    system.is_there = False
    tried = len(system.calls)
    arena.drop(KEYS[:3])
    until(lambda: len(system.calls) > tried)
    assert len(system.values) == 6 and found(arena, 6) == 0
    system.is_there = True
    until(lambda: len(system.values) == 3)
    assert sorted(system.values) == sorted(key.hex() for key in KEYS[3:6])


def dropped_of(arena: BlockArena, count: int) -> set[bytes]:
    """What a store says to have dropped, once it says so of that many."""
    dropped: set[bytes] = set()

    def are_said() -> bool:
        dropped.update(arena.take_changes()[1])
        return len(dropped) >= count

    until(are_said)
    return dropped


@pytest.mark.parametrize(
    ("url", "what"),
    {
        "redis://127.0.0.1:1": "none of",
        "lmcache://127.0.0.1": "host and a port",
        "lmcache://127.0.0.1:99999": "host and a port",
        "lmcache://127.0.0.1:1?segment=1GiB": "does not know",
        "mooncake://127.0.0.1:1?segment=much": "no size",
        "nixl://GDS/blocks": "directory",
        "nixl://POSIX": "directory",
    }.items(),
)
def test_an_address_that_cannot_be_one_is_refused(url: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        backend_at(url)
