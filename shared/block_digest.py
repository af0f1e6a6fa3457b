"""One number for a row's blocks and the generations in which it holds them: equal where scheduler and worker agree."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from zlib import crc32


def digest_blocks(block_ids: Sequence[int], generations: Sequence[int], digest: int = 0) -> int:
    """CRC-32 over both columns, in the order of the table; finds accidents, not forgery.

    `digest`: that of the row's tables before this one, in other pools."""
    return crc32(array("q", generations).tobytes(), crc32(array("q", block_ids).tobytes(), digest))
