"""Lines to a descriptor that may be full, broken, or read by a process that does not read.

The descriptor may be shared with other processes, so it stays as it is: it is never made non-blocking.  A thread of the
sink's own writes, and that thread alone waits.
"""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Callable, Iterator
from itertools import accumulate

from shared.processes.background import BackgroundQueue
from shared.processes.losses import count_loss

MAX_LINES = 10_000
MAX_BYTES = 1 << 20  # seconds of all that a service can say
FILE_BYTES = 64 << 10  # in one write to a file
NEWLINE = ord("\n")
RETRY_SECONDS = 0.01  # between attempts at a descriptor that others have made non-blocking

Notice = Callable[[int], bytes]  # the line that says how many were dropped


class Sink:
    """Writes each line whole and in order, or drops and counts it; the next line that is written reports the number.

    What is written at once to a pipe is not more than a pipe takes whole: processes that share one do not cut each
    other's lines.
    """

    def __init__(
        self, file: int, kind: str, notice: Notice, *, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES
    ) -> None:
        """`kind`: what is lost with a line, for the process's losses.  The descriptor stays the caller's."""
        self.notice = notice
        self._file = file
        self._kind = kind
        self._num_unsaid = 0  # lines that could not be written, and no line has said so
        self._is_cut = False  # the last write ended within a line
        self._queue = BackgroundQueue(
            f"{kind}-sink", self._deliver, max_items=max_lines, max_bytes=max_bytes, on_gap=self._gap
        )

    def write(self, line: bytes) -> None:
        """Queue a line with its end.  Never waits and never raises."""
        if not self._queue.put(line, len(line)):
            count_loss(self._kind)

    def drain(self, seconds: float) -> bool:
        """Wait until all is written or dropped, at most so long; whether it is."""
        return self._queue.drain(seconds)

    def _gap(self, count: int) -> list[tuple[bytes, int]]:
        notice = self.notice(count)
        return [(notice, len(notice))] if notice else []

    # -- in the thread

    def _deliver(self, lines: list[bytes]) -> None:
        if self._num_unsaid:
            notice = self.notice(self._num_unsaid)
            if not self._write([notice]):
                self._lose(len(lines))
                return
            self._num_unsaid = 0
        num_left = len(lines)
        for chunk in chunked(lines, self._most_at_once()):
            num_written = self._write(chunk)
            num_left -= num_written
            if num_written < len(chunk):
                self._lose(num_left)
                return

    def _lose(self, number: int) -> None:
        self._num_unsaid += number
        count_loss(self._kind, number)

    def _most_at_once(self) -> int:
        """Bytes."""
        try:
            is_file = stat.S_ISREG(os.fstat(self._file).st_mode)
        except OSError:
            is_file = False
        return FILE_BYTES if is_file else select.PIPE_BUF

    def _write(self, lines: list[bytes]) -> int:
        """Write until the descriptor fails; how many of the lines are there whole."""
        begin = int(self._is_cut)  # what came of a cut line ends with a line of its own
        data = b"\n" * begin + b"".join(lines)
        view = memoryview(data)
        try:
            while view:
                view = view[self._write_some(view) :]
        except OSError:
            end = len(data) - len(view)
            if end:
                self._is_cut = data[end - 1] != NEWLINE
            ends = accumulate(map(len, lines), initial=begin)
            return sum(line_end <= end for line_end in ends) - 1 if end >= begin else 0
        self._is_cut = False
        return len(lines)

    def _write_some(self, view: memoryview) -> int:
        """Raises OSError where the descriptor takes nothing."""
        while True:
            try:
                if count := os.write(self._file, view):
                    return count
                raise OSError("nothing was written")
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._file, select.POLLOUT)
                poll.poll()
                time.sleep(RETRY_SECONDS)


def chunked(lines: list[bytes], limit: int) -> Iterator[list[bytes]]:
    """The lines in order, as many at a time as `limit` bytes hold, one at least."""
    chunk: list[bytes] = []
    size = 0
    for line in lines:
        if chunk and size + len(line) > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(line)
        size += len(line)
    if chunk:
        yield chunk
