"""gRPC's connections, of which its core counts only the sum: those that one address has too many of are ended.

The core takes connections and hands over calls; no call says that a connection was made.  But the connections are
sockets of this process, and the kernel knows where each leads.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from pathlib import Path

import structlog

from services.gateway.access.connections import source_of

OWN = Path("/proc/self/fd")
LOOK_SECONDS = 1.0
UNKNOWN = ""  # a socket that is no client's

log = structlog.get_logger()


class PeerWatch:
    """Looks at this process's sockets now and then, and ends the newest of an address that has more than its share.

    A socket's inode is its name, under which it always leads to the same place.  Each processor numbers inodes from a
    stretch of its own, so they say nothing of age.  The kernel gives out the smallest free descriptor, so of sockets
    that were first seen at the same time the one with the smaller descriptor counts as older.
    """

    def __init__(self, port: int, per_address: int) -> None:
        self._port = port
        self._per_address = per_address
        self._known: dict[int, str] = {}  # inode -> source; those seen first come first
        self.num_ended = 0

    async def run(self) -> None:
        """For as long as the process lives."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        try:
            names = [path.name for path in OWN.iterdir()]
        except OSError:  # no descriptor for the directory, or no such directory on this system
            return
        if len(names) <= self._per_address // 2:  # from there on it is worth knowing which is older
            return
        descriptors = {inode: int(name) for name in names if (inode := inode_of(name))}
        known = {inode: source for inode, source in self._known.items() if inode in descriptors}
        for inode in sorted(descriptors.keys() - known.keys(), key=descriptors.__getitem__):
            known[inode] = source_at(descriptors[inode], self._port)
        self._known = known
        by_source: defaultdict[str, list[int]] = defaultdict(list)
        for inode, source in known.items():
            if source:
                by_source[source].append(inode)
        for source, inodes in by_source.items():
            if excess := inodes[self._per_address :]:
                self._end(source, [descriptors[inode] for inode in excess])

    def _end(self, source: str, descriptors: list[int]) -> None:
        ended = sum(end(descriptor, self._port, source) for descriptor in descriptors)
        self.num_ended += ended
        log.warning("connections_ended", source=source, count=ended, at_most=self._per_address, protocol="grpc")


def inode_of(name: str) -> int:
    """Of the socket with this descriptor; 0 where it is none."""
    try:
        link = str((OWN / name).readlink())
    except OSError:  # closed meanwhile
        return 0
    return int(link[len("socket:[") : -1]) if link.startswith("socket:[") else 0


def source_at(descriptor: int, port: int) -> str:
    """The client at the far end of a connection to our port."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return client_of(connection, port)
    except OSError:
        return UNKNOWN


def end(descriptor: int, port: int, source: str) -> bool:
    """Shut a connection down; the owner of the descriptor then closes it."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if client_of(connection, port) != source:  # the descriptor is another connection's by now
                return False
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def client_of(connection: socket.socket, port: int) -> str:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return UNKNOWN
    if connection.getsockname()[1] != port:
        return UNKNOWN
    return source_of(connection.getpeername()[0])
