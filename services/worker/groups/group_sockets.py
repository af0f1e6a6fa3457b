"""The socket over which a rank gets from the leader, on the same host, the descriptors of the group that it joins, and
of the next group where that one ends and the rank does not.

A rank whose socket is closed has to leave.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

MOST = 8  # descriptors
WORD = b"group"


def wait_for_group(end: socket.socket) -> list[int]:
    """At a rank's end, the descriptors of a group: the channel's, the memory's, those of links.  Empty: there is none
    any more."""
    try:
        word, descriptors, _, _ = socket.recv_fds(end, len(WORD), MOST)
    except OSError:
        return []
    return descriptors if word == WORD else []


def send_group(end: socket.socket, descriptors: Sequence[int]) -> None:
    """From the leader's end.  Raises OSError where the rank has ended."""
    socket.send_fds(end, [WORD], descriptors)


def group_socket_pair() -> tuple[socket.socket, socket.socket]:
    """The leader's end, and the rank's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def close_all(descriptors: Sequence[int]) -> None:
    for one in descriptors:
        os.close(one)
