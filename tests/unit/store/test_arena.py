"""What a store keeps: within its limit, the least recently used goes first, and every change is told once."""

from __future__ import annotations

from services.store.arena import OVERHEAD, BlockArena
from tests.unit.store.copied import copied

SPACE, OTHER = b"s" * 16, b"o" * 16
NAMES = [bytes([index]) * 16 for index in range(6)]


def filled(count: int, room: int = 3) -> BlockArena:
    arena = BlockArena(room * (100 + OVERHEAD))
    for name in NAMES[:count]:
        assert arena.keep(SPACE, name, (7, bytearray(100)))
    return arena


def test_the_least_recently_used_goes_and_that_is_told() -> None:
    arena = filled(3)
    assert arena.take_changes() == ([SPACE + name for name in NAMES[:3]], [], False)
    assert len(copied(arena, SPACE, NAMES[:1], 100)) == 1
    arena.keep(SPACE, NAMES[3], (7, bytearray(100)))
    assert arena.take_changes() == ([SPACE + NAMES[3]], [SPACE + NAMES[1]], False)
    assert arena.num_bytes <= arena.max_bytes
    assert arena.take_changes() == ([], [], False)


def test_only_a_prefix_without_a_gap_of_the_same_space_and_size_is_found() -> None:
    arena = filled(4)
    assert [len(data) for _, data in copied(arena, SPACE, NAMES[1:3], 100)] == [100, 100]
    assert copied(arena, SPACE, NAMES[:3], 100) == [], "the first is gone"
    assert copied(arena, OTHER, NAMES[1:3], 100) == []
    assert copied(arena, SPACE, NAMES[1:3], 50) == []


def test_what_is_larger_than_the_limit_is_not_kept() -> None:
    arena = filled(2)
    assert not arena.keep(SPACE, NAMES[5], (7, bytearray(4 * (100 + OVERHEAD))))
    assert len(arena) == 2


def test_a_change_is_announced_once_until_it_is_taken() -> None:
    calls: list[int] = []
    arena = BlockArena(10_000, lambda: calls.append(1))
    for name in NAMES:
        arena.keep(SPACE, name, (7, bytearray(10)))
    assert len(calls) == 1
    arena.take_changes()
    arena.keep(SPACE, NAMES[0], (8, bytearray(10)))
    assert len(calls) == 2
