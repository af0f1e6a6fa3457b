"""A recording that a thread writes: no disk holds up the scheduler's loop.

What a disk does not take in time is dropped, and so is everything after it until a new part begins with the core's
whole state: no part has a gap that a replay could take for what was asked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from services.scheduler.recording.segments import Segments, Share
from shared.background import BackgroundQueue
from shared.losses import RECORDING, count_loss

MAX_FRAMES = 200_000
MAX_BYTES = 64 << 20  # that wait for the disk
PAUSE_SECONDS = 30.0  # after a loss, before the next part: its first frame, the core's state, costs the loop time
TOO_SLOW = f"the disk is more than {MAX_BYTES >> 20} MiB behind"


class QueuedRecording:
    """Invariant: between two beginnings, what is written has no gap, but may end early."""

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        *,
        on_lost: Callable[[str], None],
        on_resumed: Callable[[], None],
        clock: Callable[[], float],
        max_waiting: int = MAX_BYTES,
    ) -> None:
        """`on_lost` and `on_resumed` may be called in the recording's own thread."""
        self._on_lost = on_lost
        self._on_resumed = on_resumed
        self._clock = clock
        self._share = Share(max_bytes)
        self._segments = Segments(path, max_bytes, self._break)
        self._is_broken = False  # what comes before the next beginning is dropped
        self._resume_at = 0.0
        self._queue: BackgroundQueue[tuple[bool, bytes]] = BackgroundQueue(
            "recording", self._deliver, max_items=MAX_FRAMES, max_bytes=max_waiting, on_gap=lambda _: []
        )

    def write(self, frame: bytes) -> None:
        if self._is_broken:
            count_loss(RECORDING)
            return
        self._share.add(len(frame))
        self._put(False, frame)

    @property
    def is_full(self) -> bool:
        if self._is_broken:
            return self._queue.is_empty and self._clock() >= self._resume_at
        return self._share.is_full

    def begin(self, frame: bytes) -> None:
        was_broken, self._is_broken = self._is_broken, False
        self._share.begin(len(frame))
        self._put(True, frame)
        if was_broken and not self._is_broken:
            self._on_resumed()

    def close(self, seconds: float) -> None:
        """Give what waits so long to be written."""
        self._queue.drain(seconds)

    def _put(self, is_beginning: bool, frame: bytes) -> None:
        if not self._queue.put((is_beginning, frame), len(frame)):
            count_loss(RECORDING)
            self._break(TOO_SLOW)

    def _break(self, reason: str) -> None:
        self._resume_at = self._clock() + PAUSE_SECONDS
        self._is_broken = True
        self._on_lost(reason)

    def _deliver(self, frames: list[tuple[bool, bytes]]) -> None:
        for is_beginning, frame in frames:
            if is_beginning:
                self._segments.begin(frame)
            else:
                self._segments.write(frame)
            if not self._segments.is_open:
                count_loss(RECORDING)
