"""A recording's files: bounded, the newest parts kept, each part good for itself.

FILE is written; when it holds its share of the bound it becomes FILE.1, that becomes FILE.2, and the oldest goes.  What
an earlier life left moves on in the same way: what it was asked last is what matters when it has died.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

NUM_SEGMENTS = 4


class Segments:
    """Writes frames as they come, whole even when the process is killed.  A full disk ends the recording, no more.

    A segment holds at least as much behind its first frame as that takes, so the bound gives where a state is large.
    """

    def __init__(self, path: Path, max_bytes: int, on_lost: Callable[[str], None]) -> None:
        self._path = path
        self._limit = max(1, max_bytes // NUM_SEGMENTS)
        self._on_lost = on_lost
        self._file = -1
        self._size = 0
        self._least = 0  # twice the first frame

    def write(self, frame: bytes) -> None:
        if self._file < 0:
            return
        try:
            view = memoryview(frame)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._lose(error)
        self._size += len(frame)

    @property
    def is_full(self) -> bool:
        return self._file >= 0 and self._size >= max(self._limit, self._least)

    def begin(self, frame: bytes) -> None:
        self.close()
        try:
            make_room(self._path)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._lose(error)
        self._size, self._least = 0, 2 * len(frame)
        self.write(frame)

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
