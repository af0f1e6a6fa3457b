"""Seats of ranks that are processes of one host: over its seat a rank gets the descriptors of the group that it joins,
and of the next one where that group ends and it does not.

A seat that is closed is a rank that has to leave.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

MOST = 8  # descriptors
WORD = b"group"


class Seat:
    """A rank's end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def wait(self) -> list[int]:
        """The descriptors of a group: the channel's, the memory's, those of links.  Empty: there is none any more."""
        try:
            word, descriptors, _, _ = socket.recv_fds(self._end, len(WORD), MOST)
        except OSError:
            return []
        return descriptors if word == WORD else []


def give(end: socket.socket, descriptors: Sequence[int]) -> None:
    """From the leader's end.  Raises OSError where the rank has gone."""
    socket.send_fds(end, [WORD], descriptors)


def seat_pair() -> tuple[socket.socket, socket.socket]:
    """The leader's end, and the rank's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def close_all(descriptors: Sequence[int]) -> None:
    for one in descriptors:
        os.close(one)
