"""A file of blocks: each has a header with a checksum of its own, and its bytes follow.

    FILE_MAGIC, then for each block: mark, bytes of the block, its checksum, its key, checksum of the header; the block

A block is appended, and never changed; one that is not to be found again gets another mark.  What a crash leaves at the
end, or a disk spoils, fails its checksum and is no block.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shared.data_link.frames import KEY_BYTES, MAX_BLOCK_BYTES, checksum
from shared.data_link.server import HeldBlock

FILE_MAGIC = b"PGSEGMT1"
AHEAD_BYTES = 16 << 20  # that the disk is to bring meanwhile: blocks of one prefix mostly lie behind each other
WHOLE, DROPPED = b"BLCK", b"DROP"

_HEADER = struct.Struct(f"!4sII{KEY_BYTES}sI")
_HEADER_SUM_BYTES = 4
RECORD_OVERHEAD = _HEADER.size


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block lies."""

    segment: Segment
    offset: int  # of its header
    size: int  # bytes of the block
    checksum: int


@dataclass(eq=False, slots=True)
class Segment:
    """One thread appends; any may read.  The file is closed when nothing refers to this any more."""

    path: Path
    end: int = len(FILE_MAGIC)  # bytes that are valid
    keys: list[bytes] = field(default_factory=list)  # of all that were appended
    _descriptor: int = -1
    _advised: range = range(0)  # that the disk was told to bring last: the kernel looks at each page of it

    @staticmethod
    def create(path: Path) -> Segment:
        """Raises OSError."""
        segment = Segment(path, _descriptor=os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600))
        try:
            _write_all(segment._descriptor, [FILE_MAGIC], 0)
        except OSError:
            segment.remove()
            raise
        return segment

    @staticmethod
    def reopen(path: Path) -> Segment | None:
        """None where it is no such file.  Raises OSError."""
        segment = Segment(path, _descriptor=os.open(path, os.O_RDWR))
        return segment if os.pread(segment._descriptor, len(FILE_MAGIC), 0) == FILE_MAGIC else None

    def scan(self) -> Iterator[tuple[bytes, BlockPlace | None]]:
        """What the file says of keys, later words behind earlier ones: where a block lies, or None for one that was
        dropped; from then on `end` is known.

        Blocks are not read.  Nothing behind a header that is not one is found.  Raises OSError.
        """
        size = os.fstat(self._descriptor).st_size
        while (header := os.pread(self._descriptor, _HEADER.size, self.end)) and len(header) == _HEADER.size:
            mark, block_bytes, wanted, key, own = _HEADER.unpack(header)
            behind = self.end + _HEADER.size + block_bytes
            is_header = own == checksum(header[:-_HEADER_SUM_BYTES]) and mark in (WHOLE, DROPPED)
            if not is_header or not 0 < block_bytes <= MAX_BLOCK_BYTES or behind > size:
                break
            offset, self.end = self.end, behind
            self.keys.append(key)
            yield key, BlockPlace(self, offset, block_bytes, wanted) if mark == WHOLE else None
        os.ftruncate(self._descriptor, self.end)

    def append(self, key: bytes, block: HeldBlock) -> BlockPlace:
        """Raises OSError, as where the disk is full; nothing is appended then."""
        wanted, data = block
        try:
            _write_all(self._descriptor, [_header(WHOLE, len(data), wanted, key), data], self.end)
        except OSError:
            os.ftruncate(self._descriptor, self.end)
            raise
        place = BlockPlace(self, self.end, len(data), wanted)
        self.keys.append(key)
        self.end += _HEADER.size + len(data)
        return place

    def read(self, place: BlockPlace, data: memoryview) -> bool:
        """Read into memory of the block's size; whether the bytes are those that were written.  Raises OSError."""
        if not self._advised.start <= place.offset < self._advised.stop - AHEAD_BYTES // 2:
            os.posix_fadvise(self._descriptor, place.offset, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            self._advised = range(place.offset, place.offset + AHEAD_BYTES)
        done = 0
        while done < place.size:
            count = os.preadv(self._descriptor, [data[done:]], place.offset + _HEADER.size + done)
            if not count:
                return False
            done += count
        return checksum(data) == place.checksum

    def drop(self, key: bytes, place: BlockPlace) -> None:
        """Have it not be found when the file is opened again.  Raises OSError."""
        _write_all(self._descriptor, [_header(DROPPED, place.size, place.checksum, key)], place.offset)

    def remove(self) -> None:
        """The file; what reads it still reads on."""
        self.path.unlink(missing_ok=True)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _header(mark: bytes, size: int, wanted: int, key: bytes) -> bytes:
    start = _HEADER.pack(mark, size, wanted, key, 0)[:-_HEADER_SUM_BYTES]
    return start + checksum(start).to_bytes(_HEADER_SUM_BYTES, "big")


def _write_all(descriptor: int, parts: list[bytes | bytearray | memoryview], offset: int) -> None:
    """Raises OSError where not all of it can be written."""
    left = [memoryview(part) for part in parts]
    while left:
        count = os.pwritev(descriptor, left, offset)
        offset += count
        while left and count >= len(left[0]):
            count -= len(left[0])
            del left[0]
        if left:
            left[0] = left[0][count:]
