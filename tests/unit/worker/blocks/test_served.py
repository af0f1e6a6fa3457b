"""Blocks are read by others in the life that was said, whatever happens to them meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.worker.blocks.served import ServedBlocks
from shared.data_link.frames import checksum

SPACE = b"s" * 16
NAMES = [bytes([index]) * 16 for index in range(4)]


class Pool:
    """Two bytes a block; a generation of each."""

    space, block_bytes = SPACE, 2

    def __init__(self) -> None:
        self.life = 1
        self.data = [bytearray([index, index]) for index in range(4)]
        self.generations = [1, 1, 1, 1]

    def num_agreeing(self, blocks: Sequence[int], generations: Sequence[int]) -> int:
        pairs = enumerate(zip(blocks, generations, strict=False))
        return next((place for place, (block, one) in pairs if self.generations[block] != one), len(blocks))

    def read(self, blocks: Sequence[int], generations: Sequence[int]) -> list[bytes]:
        return [bytes(self.data[block]) for block in blocks[: self.num_agreeing(blocks, generations)]]


def copied(served: ServedBlocks, space: bytes, names: Sequence[bytes], size: int) -> list[tuple[int, bytes]]:
    """Checksums and bytes, as another worker gets them."""
    place = memoryview(bytearray(len(names) * size))
    checksums = served.copy(space, names, size, place)
    return [(wanted, bytes(place[i * size : (i + 1) * size])) for i, wanted in enumerate(checksums)]


def test_what_was_given_to_another_or_belongs_to_an_emptied_pool_is_not_served() -> None:
    pool = Pool()
    served = ServedBlocks(pool)
    assert served.serve(NAMES, [0, 1, 2, 3], [1, 1, 7, 1]) == 2, "the third is in another life"
    assert [row for _, row in copied(served, SPACE, NAMES, 2)] == [b"\0\0", b"\1\1"]
    assert [found for found, _ in copied(served, SPACE, NAMES[1:2], 2)] == [checksum(b"\1\1")]
    assert not copied(served, b"t" * 16, NAMES, 2) and not copied(served, SPACE, NAMES, 3)
    pool.generations[1] = 2
    assert len(copied(served, SPACE, NAMES, 2)) == 1
    pool.life, pool.generations[0] = 2, 1  # generations begin anew
    assert not copied(served, SPACE, NAMES, 2)


def test_a_pool_that_is_emptied_while_a_block_is_read_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    served, read = ServedBlocks(pool), pool.read
    served.serve(NAMES, [0, 1], [1, 1])

    def emptied(blocks: Sequence[int], generations: Sequence[int]) -> list[bytes]:
        pool.life += 1
        return read(blocks, generations)

    monkeypatch.setattr(pool, "read", emptied)
    assert not copied(served, SPACE, NAMES, 2)
