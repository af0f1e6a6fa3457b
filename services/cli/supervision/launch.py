"""Becomes another program that dies with its parent: `python launch.py PARENT_PID PROGRAM ARGUMENT...`.

The kernel keeps the setting across exec, so services need no code for it, and the parent, which has threads, needs no
code of its own between fork and exec.  Run by path and without site-packages: it costs a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before prctl was called
            raise SystemExit(1)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # with `tostop` a terminal would stop processes that log to it
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
