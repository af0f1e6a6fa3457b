"""Blocks in memory, up to a limit in bytes; the least recently used go first, to a disk or a backend if it has one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from services.store.backends.blocks import BackendBlocks
from services.store.disk import DiskBlocks
from shared.data_link.server import HeldBlock

OVERHEAD = 256  # bytes of a block beside its own: its name, its place
MAX_UNTOLD = 1 << 17  # changes that were not taken; beyond, all is told anew


class BlockArena:
    """Several threads put blocks in and take them out; another one takes what has changed.

    Blocks that are being sent are kept alive by those that send them, so the limit may be exceeded for as long.  With a
    disk what comes is written there too, so that it is found again when this process is not any more; and what is asked
    for comes from there where memory has it no longer.  The same holds for a backend, which is asked last.
    """

    def __init__(
        self,
        max_bytes: int,
        on_change: Callable[[], None] = lambda: None,
        disk: DiskBlocks | None = None,
        backend: BackendBlocks | None = None,
    ) -> None:
        """`on_change` is called by the thread that changes something, if nothing else has changed since the last
        `take_changes`; it must not call anything here."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_served = 0  # blocks
        self.num_served_from_disk = 0  # of these
        self.num_served_from_backend = 0
        self.disk = disk
        self.backend = backend
        self._behind: list[DiskBlocks | BackendBlocks] = [one for one in (disk, backend) if one is not None]
        self._on_change = on_change
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, HeldBlock] = OrderedDict()  # by key, the least recently used first
        self._changes: OrderedDict[bytes, bool] = OrderedDict()  # by key: whether it is there
        self._is_overrun = False
        for one in self._behind:
            one.on_dropped = self._gone_from_behind
        if backend is not None:
            backend.on_looked_up = self._looked_up

    def __len__(self) -> int:
        return len(self._blocks)

    def keep(self, space: bytes, name: bytes, block: HeldBlock) -> bool:
        """False where it would not fit alone."""
        key = space + name
        if len(block[1]) + OVERHEAD > self.max_bytes:
            return False
        with self._lock:
            self._put(key, block)
            self._note(key, is_there=True)
            for one in self._behind:
                one.put(key, block)
        return True

    def copy(self, space: bytes, names: Sequence[bytes], block_bytes: int, place: memoryview) -> list[int]:
        """Copy the blocks of the first names that are all there in this size, one behind the other; returns their
        checksums."""
        found: list[int] = []
        while len(found) < len(names):
            rest, room = names[len(found) :], place[len(found) * block_bytes :]
            checksum = self._copy(space + rest[0], room[:block_bytes])
            more = [checksum] if checksum is not None else self._copy_from_backend(space, rest, block_bytes, room)
            if not more:
                break
            found += more
        self.num_served += len(found)
        return found

    def look_up(self, keys: Sequence[bytes]) -> None:
        """Say of each of these keys whether it is there, among the changes; a backend is asked for those that are in no
        other place.  One that does not answer leaves them unsaid."""
        with self._lock:
            here = [key for key in keys if key in self._blocks or (self.disk is not None and key in self.disk)]
        rest = [key for key in keys if key not in here]
        if self.backend is None or not rest:
            self._looked_up(here, rest)
            return
        self._looked_up(here, [])
        self.backend.look_up(rest)

    def _copy_from_backend(
        self, space: bytes, names: Sequence[bytes], block_bytes: int, place: memoryview
    ) -> list[int]:
        """Those of the first names that it has and memory does not; they are in memory then."""
        if self.backend is None:
            return []
        keys = list(takewhile(lambda key: key not in self._blocks, (space + name for name in names)))
        found = self.backend.read(keys, block_bytes)
        for start, (_, data) in enumerate(found):
            place[start * block_bytes : (start + 1) * block_bytes] = data
        with self._lock:
            self.num_served_from_backend += len(found)
            for key, block in zip(keys, found, strict=False):
                if key in self.backend and len(block[1]) + OVERHEAD <= self.max_bytes:
                    self._put(key, block)
        return [checksum for checksum, _ in found]

    def _copy(self, key: bytes, place: memoryview) -> int | None:
        """What comes from the disk stays there alone: the kernel has it in memory then, as long as there is room."""
        with self._lock:
            if (block := self._blocks.get(key)) is not None:
                self._blocks.move_to_end(key)
        if block is not None:
            checksum, data = block
            if len(data) != len(place):
                return None
            place[:] = data
            return checksum
        if self.disk is None or (found := self.disk.read(key, place)) is None:
            return None
        self.num_served_from_disk += 1
        return found

    def drop(self, keys: Iterable[bytes]) -> None:
        """Have these not be found any more, in memory and behind it.  Memory is first, as it gives to a disk what it
        has no room for; and all is done again, for what has come from a backend in between."""
        keys = list(keys)
        for _ in range(2):
            with self._lock:
                for key in keys:
                    if key in self._blocks:
                        self._remove(key)
                    self._note(key, is_there=False)
            for one in self._behind:
                one.drop(keys)

    def close(self) -> None:
        """What waits for a disk or a backend goes there, as far as there is time."""
        for one in self._behind:
            one.close()

    def take_changes(self) -> tuple[list[bytes], list[bytes], bool]:
        """Keys that are there, and keys that are not any more, of those that changed since the last call; and whether
        so many did that the first are all that there are."""
        with self._lock:
            changes, self._changes = self._changes, OrderedDict()
            is_overrun, self._is_overrun = self._is_overrun, False
            if is_overrun:
                return self._all(), [], True
        kept = [key for key, is_there in changes.items() if is_there]
        return kept, [key for key, is_there in changes.items() if not is_there], False

    def keys(self) -> list[bytes]:
        """All that are there; changes so far are in them."""
        with self._lock:
            self._changes.clear()
            self._is_overrun = False
            return self._all()

    def _all(self) -> list[bytes]:
        behind = (key for one in self._behind for key in one.keys())  # noqa: SIM118 - it is no dict
        return list(dict.fromkeys([*behind, *self._blocks]))

    def _gone_from_behind(self, keys: list[bytes]) -> None:
        with self._lock:
            for key in keys:
                if key not in self._blocks and not any(key in one for one in self._behind):
                    self._note(key, is_there=False)

    def _looked_up(self, found: list[bytes], absent: list[bytes]) -> None:
        with self._lock:
            for key in found:
                self._note(key, is_there=True)
            for key in absent:
                self._note(key, is_there=key in self._blocks)

    def _put(self, key: bytes, block: HeldBlock) -> None:
        if key in self._blocks:
            self._remove(key)
        size = len(block[1]) + OVERHEAD
        while self._blocks and self.num_bytes + size > self.max_bytes:
            oldest, old = next(iter(self._blocks.items()))
            self._remove(oldest)
            if not any(oldest in one or one.put(oldest, old) for one in self._behind):
                self._note(oldest, is_there=False)
        self._blocks[key] = block
        self.num_bytes += size

    def _remove(self, key: bytes) -> None:
        _, data = self._blocks.pop(key)
        self.num_bytes -= len(data) + OVERHEAD

    def _note(self, key: bytes, *, is_there: bool) -> None:
        is_first = not self._changes
        self._changes[key] = is_there
        if is_first:
            self._on_change()
        if len(self._changes) > MAX_UNTOLD:
            self._is_overrun = True
            self._changes = OrderedDict([(key, is_there)])
