"""Where every command begins and ends: whatever goes wrong is one line on standard error, never a trace.

Nothing is imported before `run` has taken care of Ctrl-C, so that it may come at any time.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def run() -> None:
    """The program `pageant`."""
    can_be_interrupted = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if can_be_interrupted:
        signal.signal(signal.SIGINT, _leave)  # an import that is interrupted ends in its own words
    from services.cli.command_line.failures import end
    from services.cli.main import main

    status = 0
    try:
        if can_be_interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main.main(standalone_mode=False) or 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1 if error.code else 0
    except BaseException as error:
        status = end(error)
    finally:
        if can_be_interrupted:
            signal.signal(signal.SIGINT, _leave)  # what is left are the interpreter's own last things
    sys.exit(_flushed(status))


def _flushed(status: int) -> int:
    """What standard output still holds; the reader of a pipe may have left."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries again, and complains
        return status or 1
    return status


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
