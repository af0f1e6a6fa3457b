"""The file of a recording, which a thread writes: no disk holds up the scheduler's loop.

A recording holds what one life of a scheduler was asked, from its beginning.  It ends at its bound, and where a disk
does not take it: so it has no gap that a replay could take for what was asked.  What earlier lives left is kept as
FILE.1, FILE.2 ...: of a scheduler that has died, that is what matters.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path

from shared.processes.background import BackgroundQueue
from shared.processes.losses import RECORDING, count_loss

NUM_LIVES = 4  # that are kept, the present one among them
MAX_FRAMES = 200_000
MAX_BYTES = 64 << 20  # that wait for the disk
TOO_SLOW = f"the disk is more than {MAX_BYTES >> 20} MiB behind"
GZIP, FASTEST = 31, 1  # zlib's: the format, and how hard it tries


class QueuedRecording:
    """Invariant: what is in the file is a beginning of what was written, compressed."""

    def __init__(
        self, path: Path, max_bytes: int, *, on_end: Callable[[str], None], max_waiting: int = MAX_BYTES
    ) -> None:
        """`max_bytes`: of the file.  `on_end` may be called in the recording's own thread."""
        self._path = path
        self._left = max_bytes
        self._on_end = on_end
        self._has_ended = False
        self._file = -1  # opened in the thread
        self._compressor = zlib.compressobj(FASTEST, wbits=GZIP)
        self._queue: BackgroundQueue[bytes] = BackgroundQueue(
            "recording", self._deliver, max_items=MAX_FRAMES, max_bytes=max_waiting, on_gap=lambda _: []
        )

    def write(self, frame: bytes) -> None:
        if self._has_ended:
            count_loss(RECORDING)
        elif not self._queue.put(frame, len(frame)):
            count_loss(RECORDING)
            self._end(TOO_SLOW)

    def close(self, seconds: float) -> None:
        """Give what waits so long to be written."""
        self._queue.drain(seconds)

    def _end(self, reason: str) -> None:
        self._has_ended = True
        self._on_end(reason)

    def _deliver(self, frames: list[bytes]) -> None:
        if self._left <= 0:
            count_loss(RECORDING, len(frames))
            return
        view = memoryview(self._compressor.compress(b"".join(frames)) + self._compressor.flush(zlib.Z_SYNC_FLUSH))
        self._left -= len(view)
        try:
            if self._file < 0:
                make_room(self._path)
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._left = 0
            self._end(str(error))
        else:
            if self._left <= 0:
                self._end("it has reached record_bytes")


def make_room(path: Path) -> None:
    """Move the recording of every earlier life one place back; the last one goes."""
    for age in range(NUM_LIVES - 1, 0, -1):
        newer = of_life(path, age - 1)
        if newer.exists():
            newer.replace(of_life(path, age))


def of_life(path: Path, age: int) -> Path:
    """The file of so many lives ago; 0 is the present one's."""
    return path.with_name(f"{path.name}.{age}") if age else path
