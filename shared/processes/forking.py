"""What a supervisor tells a process that forks services for it, with three descriptors: the socket over which the
service says its process id, and its standard output and error."""

from __future__ import annotations

import msgspec

MAX_ORDER = 1 << 16  # bytes
NUM_DESCRIPTORS = 3


class ForkOrder(msgspec.Struct, frozen=True):
    program: str  # a package with a `__main__`, as for `python -m`
    environment: dict[str, str]  # beside what the forking process itself has
    supervisor: int  # process id
