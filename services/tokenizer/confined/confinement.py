"""What every child process of the tokenizer does: it is confined before it sees anything that a client has written.

Bounded memory, no files, no children of its own; it dies with its parent.  A job that takes too long, the parent ends.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO, TypeVar

import msgspec

from services.tokenizer.confined.frames import PREFIX, ChildSetup, to_frame

PR_SET_PDEATHSIG = 1

S = TypeVar("S", bound=ChildSetup)
J = TypeVar("J", bound=msgspec.Struct)


def serve(setup: type[S], job: type[J], prepare: Callable[[S], Callable[[J], msgspec.Struct]]) -> None:
    """Read a setup and then jobs from standard input, and answer each on standard output, until the parent closes the
    pipe.

    `prepare` returns the function that answers a job.  It reads every file that jobs need: none can be opened later.
    """
    die_with_parent(os.getppid())
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    if (frame := read_frame(requests)) is None:
        return
    given = msgspec.json.decode(frame, type=setup)
    answer = prepare(given)
    confine(given.max_memory)
    jobs = msgspec.json.Decoder(job)
    while (frame := read_frame(requests)) is not None:
        limit_cpu(given.max_cpu_seconds)
        answers.write(to_frame(answer(jobs.decode(frame))))
        answers.flush()


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
    """`max_memory` in bytes of address space.  Modules that are imported later must have been read already."""
    limits = {resource.RLIMIT_AS: max_memory, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
    for kind, most in (limits | {resource.RLIMIT_NOFILE: 0, resource.RLIMIT_NPROC: 0}).items():
        resource.setrlimit(kind, (most, most))


def limit_cpu(seconds: int) -> None:
    """Allow so much from now on: it ends a child that spins while its parent is stopped."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = math.ceil(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, hard))
