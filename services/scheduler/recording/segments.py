"""A recording's files: bounded, the newest parts kept, each part good for itself.

FILE is written; when it holds its share of the bound it becomes FILE.1, that becomes FILE.2, and the oldest goes.  What
an earlier life left moves on in the same way: what it was asked last is what matters when it has died.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

NUM_SEGMENTS = 4


class Share:
    """How much of its share of the bound a segment holds.

    It holds at least as much behind its first frame as that takes, so the bound gives where a state is large.
    """

    def __init__(self, max_bytes: int) -> None:
        self._limit = max(1, max_bytes // NUM_SEGMENTS)
        self._least = 0  # twice the first frame
        self._size = 0

    def begin(self, num_bytes: int) -> None:
        self._size, self._least = num_bytes, 2 * num_bytes

    def add(self, num_bytes: int) -> None:
        self._size += num_bytes

    @property
    def is_full(self) -> bool:
        return self._size >= max(self._limit, self._least)


class Segments:
    """Writes frames as they come, whole even when the process is killed.

    What cannot be written ends the segment: what is written then is dropped until the next one begins.  A segment
    without its first frame is good for nothing, so the next one takes its place, and drives out no other.
    """

    def __init__(self, path: Path, max_bytes: int, on_lost: Callable[[str], None]) -> None:
        self._path = path
        self._on_lost = on_lost
        self._file = -1
        self._share = Share(max_bytes)
        self._is_worth_keeping = True  # what FILE holds; at first that is an earlier life's

    def write(self, frame: bytes) -> None:
        if self._file < 0:
            return
        try:
            view = memoryview(frame)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._lose(error)
        self._share.add(len(frame))

    @property
    def is_open(self) -> bool:
        """Whether what is written is kept."""
        return self._file >= 0

    @property
    def is_full(self) -> bool:
        return self.is_open and self._share.is_full

    def begin(self, frame: bytes) -> None:
        self.close()
        try:
            if self._is_worth_keeping:
                make_room(self._path)
            self._is_worth_keeping = False
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._lose(error)
        self.write(frame)
        self._share.begin(len(frame))
        self._is_worth_keeping = self.is_open

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _lose(self, error: OSError) -> None:
        self.close()
        self._on_lost(str(error))


def make_room(path: Path) -> None:
    """Move every segment one place back; the last one goes."""
    for age in range(NUM_SEGMENTS - 1, 0, -1):
        newer = path if age == 1 else segment(path, age - 1)
        if newer.exists():
            newer.replace(segment(path, age))


def segment(path: Path, age: int) -> Path:
    """The file of so many segments ago; 0 is the one that is written."""
    return path.with_name(f"{path.name}.{age}") if age else path
