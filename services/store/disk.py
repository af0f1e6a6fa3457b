"""Blocks on a disk, in segments: written by a thread of its own, found again by the next life of a store.

The oldest segment goes when there is no room; what was asked for in one of the oldest is written again before.  Nothing
that a disk does is an error of the store: what it does not take stays in memory alone, and what it spoils is not there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from services.store.segments import RECORD_OVERHEAD, BlockPlace, Segment
from shared.data_link.server import HeldBlock
from shared.errors import ConfigError
from shared.transport.link import worth_a_line

log = structlog.get_logger()

NUM_SEGMENTS = 32  # into which a disk's limit is divided
MOST_SEGMENT_BYTES = 256 << 20
MAX_SLOTS = 64  # stores of one directory
REST_SECONDS = 10.0  # that nothing is written after a write failed
CLOSE_SECONDS = 20.0  # that the last writes may take
ENDING = ".blocks"


class DiskBlocks:
    """Any thread may call; one of its own writes.

    Invariant: a key that was taken is in `_pending` until it is in `_places`, so that it can be read all the time.
    """

    def __init__(self, directory: Path, max_bytes: int, max_pending: int) -> None:
        """`directory` may be that of several stores: each takes a part of it that no other has.  `max_pending`: bytes
        that wait to be written.  Raises ConfigError where the directory cannot be used.
        """
        self.on_dropped: Callable[[list[bytes]], None] = lambda keys: None  # by any thread, with keys that are gone
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_failed = 0  # writes
        self.num_corrupt = 0  # blocks that were read otherwise than they had been written
        self._most = max(1, min(MOST_SEGMENT_BYTES, max_bytes // NUM_SEGMENTS))
        self._max_pending = max_pending
        self._condition = threading.Condition()
        self._pending: OrderedDict[bytes, HeldBlock] = OrderedDict()
        self._pending_bytes = 0
        self._places: dict[bytes, BlockPlace] = {}
        self._segments: list[Segment] = []  # the oldest first
        self._rests_until = 0.0
        self._is_closed = False
        try:
            self._slot, self._lock = claim_slot(directory)
            self._number = self._find_again()
        except OSError as error:
            raise ConfigError(f"store_disk {directory} cannot be used: {error}") from error
        self._thread = threading.Thread(target=self._write, name="disk", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._places or key in self._pending

    def __len__(self) -> int:
        return len(self._places)

    def keys(self) -> list[bytes]:
        with self._condition:
            return list(dict.fromkeys([*self._places, *self._pending]))

    def put(self, key: bytes, block: HeldBlock) -> bool:
        """Have a block written; False where that is not possible at present."""
        with self._condition:
            place = self._places.get(key)
            if place is not None and (place.checksum, place.size) == (block[0], len(block[1])):
                return True
            return self._queue(key, block)

    def read(self, key: bytes, data: memoryview) -> int | None:
        """Read a block into memory of its size; returns its checksum.  None where it is not there in this size, or not
        as it was written: then it is there no more."""
        with self._condition:
            waiting, place = self._pending.get(key), self._places.get(key)
            is_old = place is not None and place.segment in self._next_to_go
        if waiting is not None:
            if len(waiting[1]) != len(data):
                return None
            data[:] = waiting[1]
            return waiting[0]
        if place is None or place.size != len(data):
            return None
        try:
            is_whole = place.segment.read(place, data)
        except OSError as error:
            log.warning("disk_read_failed", reason=str(error))
            is_whole = False
        if not is_whole:
            self.num_corrupt += 1
            log.warning("disk_block_corrupt", segment=place.segment.path.name, num_corrupt=self.num_corrupt)
            self.drop([key])
            self.on_dropped([key])
            return None
        if is_old:
            with self._condition:
                if self._at(key) is place.segment:  # else it was dropped meanwhile
                    self._queue(key, (place.checksum, bytearray(data)))
        return place.checksum

    def drop(self, keys: Iterable[bytes]) -> None:
        """Have them not be found any more, by a later life neither."""
        with self._condition:
            for key in keys:
                if (waiting := self._pending.pop(key, None)) is not None:
                    self._pending_bytes -= len(waiting[1])
                if (place := self._places.pop(key, None)) is not None:
                    with contextlib.suppress(OSError):  # the disk is broken: its checksum is all that there is
                        place.segment.drop(key, place)

    def close(self) -> None:
        """Write what waits, as far as there is time."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join(timeout=CLOSE_SECONDS)
        os.close(self._lock)

    # -- what an earlier life has left

    def _find_again(self) -> int:
        """Returns a number greater than those of all files."""
        number = 0
        for path in sorted(self._slot.glob(f"*{ENDING}")):
            if not path.stem.isdigit():
                continue
            number = max(number, int(path.stem))
            try:
                segment = Segment.reopen(path)
            except OSError as error:
                log.warning("segment_unreadable", segment=path.name, reason=str(error))
                continue
            if segment is None:
                path.unlink(missing_ok=True)
                continue
            try:
                for key, place in segment.scan():
                    if place is None:
                        self._places.pop(key, None)
                    else:
                        self._places[key] = place
            except OSError as error:
                log.warning("segment_unreadable", segment=path.name, reason=str(error))
            self._segments.append(segment)
            self.num_bytes += segment.end
        if self._segments:
            log.info("segments_found", num_segments=len(self._segments), num_blocks=len(self), bytes=self.num_bytes)
        self._make_room(0)
        return number + 1

    # -- the thread

    def _queue(self, key: bytes, block: HeldBlock) -> bool:
        if self._is_closed or self._pending_bytes + len(block[1]) > self._max_pending:
            return False
        if len(block[1]) + RECORD_OVERHEAD > self.max_bytes or time.monotonic() < self._rests_until:
            return False
        if (waiting := self._pending.pop(key, None)) is not None:
            self._pending_bytes -= len(waiting[1])
        self._pending[key] = block
        self._pending_bytes += len(block[1])
        self._condition.notify()
        return True

    def _write(self) -> None:
        while True:
            with self._condition:
                while not self._pending and not self._is_closed:
                    self._condition.wait()
                if not self._pending:
                    return
                key, block = next(iter(self._pending.items()))
            place: BlockPlace | None = None
            try:
                place = self._segment_for(RECORD_OVERHEAD + len(block[1])).append(key, block)
                self.num_bytes += RECORD_OVERHEAD + place.size
            except OSError as error:
                self._failed(error)
            self._written(key, block, place)

    def _written(self, key: bytes, block: HeldBlock, place: BlockPlace | None) -> None:
        gone: list[bytes] = []
        with self._condition:
            is_wanted = self._pending.get(key) is block
            if is_wanted:
                del self._pending[key]
                self._pending_bytes -= len(block[1])
            if place is not None and is_wanted:
                self._places[key] = place
            elif place is not None:
                with contextlib.suppress(OSError):
                    place.segment.drop(key, place)
            else:  # what waits beside it is not written either
                gone = [name for name in (key, *self._pending) if name not in self._places]
                self._pending.clear()
                self._pending_bytes = 0
        if gone:
            self.on_dropped(gone)

    def _failed(self, error: OSError) -> None:
        self.num_failed += 1
        self._rests_until = time.monotonic() + REST_SECONDS
        if worth_a_line(self.num_failed):
            log.warning("disk_write_failed", reason=str(error), num_failed=self.num_failed)

    def _segment_for(self, size: int) -> Segment:
        """One that has room for so many bytes.  Raises OSError."""
        self._make_room(size)
        if not self._segments or self._segments[-1].end + size > max(self._most, size):
            segment = Segment.create(self._slot / f"{self._number:08d}{ENDING}")
            self._number += 1
            self.num_bytes += segment.end
            with self._condition:
                self._segments.append(segment)
        return self._segments[-1]

    def _make_room(self, size: int) -> None:
        while self._segments and self.num_bytes + size > self.max_bytes:
            with self._condition:
                oldest = self._segments.pop(0)
                gone = [key for key in oldest.keys if self._at(key) is oldest]
                for key in gone:
                    del self._places[key]
                self.num_bytes -= oldest.end
            oldest.remove()
            self.on_dropped(gone)

    @property
    def _next_to_go(self) -> list[Segment]:
        return self._segments[: len(self._segments) // 4] if self.num_bytes > self.max_bytes * 3 // 4 else []

    def _at(self, key: bytes) -> Segment | None:
        place = self._places.get(key)
        return place.segment if place is not None else None


def claim_slot(directory: Path) -> tuple[Path, int]:
    """A folder of a directory that no other process has, and the descriptor of its lock.  Raises OSError."""
    for number in range(MAX_SLOTS):
        slot = directory / f"store-{number}"
        slot.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(slot / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError:
            os.close(lock)
            raise
        return slot, lock
    raise OSError(f"{MAX_SLOTS} stores have it already")
