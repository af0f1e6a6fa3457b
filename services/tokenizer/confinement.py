"""What every child process of the tokenizer does before it sees anything that a client has written.

Bounded memory, no files, no children of its own; it dies with its parent.  What it does too long, the parent ends.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from typing import BinaryIO

from services.tokenizer.frames import PREFIX

PR_SET_PDEATHSIG = 1


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's content; None at the end."""
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    return stream.read(PREFIX.unpack(prefix)[0])


def die_with_parent(parent: int) -> None:
    """`parent`: as it was when this process began."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            sys.exit(0)


def confine(max_memory: int) -> None:
    """`max_memory` in bytes of address space.  What is imported after this must have been read already."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def limit_cpu(seconds: int) -> None:
    """Allow so much from now on: it ends a child that spins while its parent is stopped."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = math.ceil(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))
