"""Standard output and error of a process that must outlive their readers.

Log lines, warnings, tracebacks and what libraries print all go to `sys.stdout` and `sys.stderr`.  A service's are
bounded sinks: a reader that leaves or does not read, or a full disk, costs lines and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
from typing import TextIO, cast

from shared.processes.losses import LOG
from shared.processes.sink import Notice, Sink

LAST_WORDS_SECONDS = 1.0  # that the last lines have at the end of a process


class LineStream(io.TextIOBase):
    """Text to a sink.  What is written in one call is dropped or written as one."""

    def __init__(self, file: int, number: int) -> None:
        """`number`: the descriptor that it stands for."""
        self._number = number
        self.sink = Sink(file, LOG, in_words)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def write(self, text: str, /) -> int:
        if line := text.encode(self.encoding, self.errors):
            self.sink.write(line)
        return len(text)

    def flush(self) -> None:
        """Does not wait; `drain_standard_streams` does, at the end."""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        try:
            return os.isatty(self._number)
        except OSError:
            return False

    def fileno(self) -> int:
        return self._number


def in_words(count: int) -> bytes:
    return f"pageant: {count} lines are missing here\n".encode()


def guard_standard_streams() -> None:
    """From now on no line that this process writes can fail or wait.  Last lines have a moment at its end."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a terminal with tostop would stop a process that logs to it
    for name, original, number in (("stdout", sys.__stdout__, 1), ("stderr", sys.__stderr__, 2)):
        stream = getattr(sys, name)
        if isinstance(stream, LineStream):
            continue
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
        # Where it was closed at the start, its number may be a socket's by now.
        file = number if original is not None else os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        setattr(sys, name, cast(TextIO, LineStream(file, number)))
    atexit.unregister(drain_standard_streams)
    atexit.register(drain_standard_streams)


def drain_standard_streams() -> None:
    """Wait for the last lines to be written, for a bounded time."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LineStream):
            stream.sink.drain(LAST_WORDS_SECONDS)


def tell_missing_lines(notice: Notice) -> None:
    """The line with which standard error reports lost lines, where it is guarded."""
    if isinstance(sys.stderr, LineStream):
        sys.stderr.sink.notice = notice
