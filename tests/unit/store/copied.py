"""What a store has, as another process gets it."""

from __future__ import annotations

from collections.abc import Sequence

from services.store.arena import BlockArena


def copied(arena: BlockArena, space: bytes, names: Sequence[bytes], size: int) -> list[tuple[int, bytes]]:
    """Checksums and bytes of the first blocks."""
    place = memoryview(bytearray(len(names) * size))
    checksums = arena.copy(space, names, size, place)
    return [(wanted, bytes(place[i * size : (i + 1) * size])) for i, wanted in enumerate(checksums)]
