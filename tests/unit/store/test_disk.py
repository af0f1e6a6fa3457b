"""Blocks on a disk: found again by the next life, and whatever becomes of the files is a miss."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.store import disk as disk_module
from services.store.arena import OVERHEAD, BlockArena
from services.store.disk import DiskBlocks
from services.store.segments import RECORD_OVERHEAD
from shared.data_link.frames import checksum
from tests.unit.store.copied import copied

SPACE, SIZE = b"s" * 16, 1000
NAMES = [index.to_bytes(16, "big") for index in range(200)]


def block(index: int) -> tuple[int, bytes]:
    data = bytearray(index.to_bytes(4, "big") * (SIZE // 4))
    return checksum(data), bytes(data)


def opened(directory: Path, *, room: int = 200, in_memory: int = 2) -> BlockArena:
    disk = DiskBlocks(directory, room * (SIZE + RECORD_OVERHEAD), 1 << 20)
    return BlockArena(in_memory * (SIZE + OVERHEAD), disk=disk)


def closed(arena: BlockArena) -> None:
    assert arena.disk is not None
    arena.disk.close()


def fill(arena: BlockArena, count: int) -> None:
    for index in range(count):
        assert arena.keep(SPACE, NAMES[index], block(index))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def written(arena: BlockArena) -> None:
    disk = arena.disk
    assert disk is not None
    until(lambda: not disk._pending)


def held(arena: BlockArena, count: int) -> list[int]:
    """Which are found, each with the bytes that it had."""
    found = {index: copied(arena, SPACE, [NAMES[index]], SIZE) for index in range(count)}
    assert all(blocks in ([], [block(index)]) for index, blocks in found.items())
    return [index for index, blocks in found.items() if blocks]


def test_more_than_memory_holds_is_found_and_again_in_the_next_life(tmp_path: Path) -> None:
    arena = opened(tmp_path)
    fill(arena, 40)
    assert held(arena, 41) == list(range(40))
    kept, dropped, _ = arena.take_changes()
    assert (len(kept), dropped) == (40, []), "what memory has no more is not gone"
    assert arena.num_bytes <= arena.max_bytes
    closed(arena)
    again = opened(tmp_path)
    assert sorted(again.keys()) == [SPACE + name for name in NAMES[:40]]
    assert held(again, 41) == list(range(40))
    fill(again, 41)  # what is there already is not written twice
    closed(again)
    assert again.disk is not None
    assert len(again.disk) == 41
    assert again.disk.num_bytes < 42 * (SIZE + RECORD_OVERHEAD) + 64 * 8


def test_the_oldest_segment_goes_and_that_is_told(tmp_path: Path) -> None:
    arena = opened(tmp_path, room=64, in_memory=4)
    assert arena.disk is not None
    for index in range(150):
        assert arena.keep(SPACE, NAMES[index], block(index))
        written(arena)
        if index >= 10:
            assert copied(arena, SPACE, [NAMES[3]], SIZE), "what is asked for stays"
    written(arena)
    _, dropped, _ = arena.take_changes()
    assert arena.disk.num_bytes <= arena.disk.max_bytes
    assert SPACE + NAMES[50] in dropped
    keys = set(arena.keys())
    assert keys >= {SPACE + NAMES[index] for index in (3, *range(100, 150))}
    gone = [name for name in NAMES[:150] if SPACE + name not in keys]
    assert not any(copied(arena, SPACE, [name], SIZE) for name in gone)
    # Only the newest are read: whatever is read of the oldest segments is written again, and drops others meanwhile.
    assert all(copied(arena, SPACE, [NAMES[index]], SIZE) == [block(index)] for index in range(120, 150))
    closed(arena)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def spoil_block(path: Path) -> None:
    flip(path, 8 + 2 * (SIZE + RECORD_OVERHEAD) + RECORD_OVERHEAD + 77)


def spoil_header(path: Path) -> None:
    flip(path, 8 + 2 * (SIZE + RECORD_OVERHEAD) + 5)


def cut_short(path: Path) -> None:
    os.truncate(path, 8 + 3 * (SIZE + RECORD_OVERHEAD) - 10)


def replace(path: Path) -> None:
    path.write_bytes(b"something else")


SPOILT: dict[str, tuple[Callable[[Path], None], list[int], int]] = {  # what is found, and corrupt blocks
    "a block's bytes": (spoil_block, [0, 1, 3, 4, 5], 1),
    "a header": (spoil_header, [0, 1], 0),
    "cut short": (cut_short, [0, 1], 0),
    "another file": (replace, [], 0),
}


@pytest.mark.parametrize(("spoil", "left", "num_corrupt"), SPOILT.values(), ids=SPOILT)
def test_a_spoilt_file_is_a_miss(
    tmp_path: Path, spoil: Callable[[Path], None], left: list[int], num_corrupt: int
) -> None:
    arena = opened(tmp_path, room=32 * 10)  # ten blocks to a segment
    fill(arena, 6)
    closed(arena)
    (path,) = tmp_path.glob("store-0/*.blocks")
    spoil(path)
    for _ in range(2):  # the life that finds out, and the next
        again = opened(tmp_path)
        assert held(again, 6) == left
        assert again.disk is not None
        assert again.disk.num_corrupt == num_corrupt
        num_corrupt = 0  # what was found out is not found again
        assert sorted(again.keys()) == [SPACE + NAMES[index] for index in left]
        closed(again)
    again = opened(tmp_path)
    fill(again, 8)
    assert held(again, 9) == list(range(8)), "it goes on"
    closed(again)


def test_a_full_disk_leaves_what_memory_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = opened(tmp_path, in_memory=4)
    fill(arena, 6)
    write = os.pwritev
    written(arena)

    def full(descriptor: int, parts: Any, offset: int) -> int:
        write(descriptor, [memoryview(parts[0])[:10]], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_module, "REST_SECONDS", 0.0)
    monkeypatch.setattr(os, "pwritev", full)
    arena.take_changes()
    for index in range(6, 16):
        assert arena.keep(SPACE, NAMES[index], block(index))
        written(arena)
    monkeypatch.setattr(os, "pwritev", write)
    assert held(arena, 16) == [*range(6), *range(12, 16)]
    kept, dropped, _ = arena.take_changes()
    assert set(dropped) == {SPACE + name for name in NAMES[6:12]} - set(kept)
    closed(arena)
    again = opened(tmp_path)
    assert set(held(again, 16)) >= set(range(6)), "nothing of what failed is in the way"
    closed(again)


def test_what_is_dropped_is_not_found_again(tmp_path: Path) -> None:
    arena = opened(tmp_path)
    fill(arena, 5)
    written(arena)
    arena.drop([SPACE + NAMES[1], SPACE + NAMES[4]])
    assert held(arena, 5) == [0, 2, 3]
    closed(arena)
    again = opened(tmp_path)
    assert held(again, 5) == [0, 2, 3]
    closed(again)


def test_two_stores_share_a_directory_and_no_file(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    fill(one, 3)
    assert held(other, 3) == []
    closed(one)
    third = opened(tmp_path)  # takes the place of the first
    assert held(third, 3) == [0, 1, 2]
    closed(third)
    closed(other)


def test_what_is_dropped_does_not_come_back_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread keeps a block meanwhile, for which memory gives its oldest one to the disk."""
    arena = opened(tmp_path)
    fill(arena, 2)
    written(arena)
    disk = arena.disk
    assert disk is not None
    really = disk.drop

    def drop(keys: list[bytes]) -> None:
        really(keys)
        arena.keep(SPACE, NAMES[2], block(2))

    monkeypatch.setattr(disk, "drop", drop)
    arena.drop([SPACE + name for name in NAMES[:2]])
    assert held(arena, 3) == [2] and SPACE + NAMES[0] not in disk
    closed(arena)
