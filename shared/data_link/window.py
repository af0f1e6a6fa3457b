"""Memory through which blocks pass on one host: the server writes them there, and the other side reads them.

Each connection over a Unix socket has a window of its own, a file without a name (memfd) whose descriptor the server
sends.  So nothing is left of it when both processes are gone, however they end.  It is divided into slots, which are
used in turn; the server writes to one again only when the other side has said that it has read it.  The seals keep
either side from making it smaller, which would kill the other one when it touches the memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

from shared.data_link.frames import group_size
from shared.errors import ProtocolError

WINDOW_BYTES = 32 << 20  # of addresses: memory is taken for what is used of it
NUM_SLOTS = 4  # at most; more are of no use, and what is used often stays in the processor's cache
LEAST_SLOTS = 2  # with one, each side would wait for the other
READY = b"\1"  # comes with the descriptor, or alone where there is no window
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Window:
    """The memory of one connection, as one side has mapped it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memoryview(memory)

    def slots(self, block_bytes: int) -> list[memoryview]:
        """Where groups of blocks of a size lie, in turn; none where they are too large, and pass the socket."""
        size = group_size(block_bytes) * block_bytes
        count = min(NUM_SLOTS, len(self._memory) // size)
        return [self._memory[i * size : (i + 1) * size] for i in range(count)] if count >= LEAST_SLOTS else []


def send_window(link: socket.socket) -> Window | None:
    """Make a window and send its descriptor; none where the other side is on another host.  Raises OSError."""
    if link.family != socket.AF_UNIX:
        link.sendall(READY)
        return None
    descriptor = os.memfd_create("pageant-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, WINDOW_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        window = Window(mmap.mmap(descriptor, WINDOW_BYTES))
        socket.send_fds(link, [READY], [descriptor])
    finally:
        os.close(descriptor)
    return window


def receive_window(link: socket.socket) -> Window | None:
    """What `send_window` has sent.  Raises OSError where the link is closed, ProtocolError for memory that could
    shrink."""
    if link.family != socket.AF_UNIX:
        if link.recv(len(READY)) != READY:
            raise ConnectionError("the other side of a data link has closed it")
        return None
    ready, descriptors, _, _ = socket.recv_fds(link, len(READY), 1)
    try:
        if ready != READY:
            raise ConnectionError("the other side of a data link has closed it")
        if len(descriptors) != 1 or fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ProtocolError("the memory of a data link is not sealed")
        if os.fstat(descriptors[0]).st_size != WINDOW_BYTES:
            raise ProtocolError("the memory of a data link has another size")
        return Window(mmap.mmap(descriptors[0], WINDOW_BYTES, prot=mmap.PROT_READ))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
