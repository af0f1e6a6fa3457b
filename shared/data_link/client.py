"""A worker's side of data links: asks a store for blocks, or gives it some.  It blocks the thread that calls it."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from shared.data_link.addresses import connected
from shared.data_link.frames import (
    CHALLENGE_BYTES,
    GET,
    MAGIC,
    PUT,
    BlockRequest,
    Bytes,
    checksum,
    proof,
    read_checksums,
    read_count,
    receive,
    receive_into,
    send_blocks,
)
from shared.errors import ProtocolError

SECONDS = 5.0  # that one call of a socket may take
MAX_LINKS = 8


class CorruptBlockError(ProtocolError):
    """A block has other bytes than its checksum says."""


class DataLinks:
    """Connections to stores, each made when it is first wanted and kept; one that fails is closed."""

    def __init__(self, directory: Path, seconds: float = SECONDS) -> None:
        """`directory`: the deployment's own; only sockets in it are connected to."""
        self._directory = directory
        self._seconds = seconds
        self._links: dict[str, socket.socket] = {}

    def put(self, address: str, secret: bytes, space: bytes, names: Sequence[bytes], blocks: Sequence[Bytes]) -> int:
        """How many of these blocks of one size, the first ones, the store has now.  Raises OSError, ProtocolError."""
        checksums = [checksum(block) for block in blocks]
        link = self._link(address, secret)
        try:
            link.sendall(BlockRequest(PUT, len(blocks[0]), space, names).encode())
            send_blocks(link, checksums, blocks)
            return read_count(link, len(names))
        except (OSError, ProtocolError):
            self.forget(address)
            raise

    def get(
        self,
        address: str,
        secret: bytes,
        space: bytes,
        names: Sequence[bytes],
        places: Sequence[memoryview],
        deadline: float = math.inf,  # by time.monotonic
    ) -> int:
        """Fill places of one size with blocks; returns how many there were, the first ones.

        Raises OSError (a TimeoutError behind the deadline), ProtocolError, and CorruptBlockError where a block is not
        what its checksum says.
        """
        link = self._link(address, secret, self._time_until(deadline))
        try:
            link.settimeout(self._time_until(deadline))
            link.sendall(BlockRequest(GET, len(places[0]), space, names).encode())
            count = read_count(link, len(names))
            checksums = read_checksums(link, count)
            for place in places[:count]:
                link.settimeout(self._time_until(deadline))
                receive_into(link, place)
            link.settimeout(self._seconds)
        except (OSError, ProtocolError):
            self.forget(address)
            raise
        if any(checksum(place) != wanted for place, wanted in zip(places, checksums, strict=False)):
            raise CorruptBlockError("a block has other bytes than its checksum says")
        return count

    def _time_until(self, deadline: float) -> float:
        """Seconds that one call of a socket may take.  Raises TimeoutError."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it takes too long")
        return min(left, self._seconds)

    def forget(self, address: str) -> None:
        if (link := self._links.pop(address, None)) is not None:
            with contextlib.suppress(OSError):
                link.close()

    def close(self) -> None:
        for address in list(self._links):
            self.forget(address)

    def _link(self, address: str, secret: bytes, seconds: float | None = None) -> socket.socket:
        if address not in self._links:
            while len(self._links) >= MAX_LINKS:
                self.forget(next(iter(self._links)))
            link = connected(address, self._directory, seconds or self._seconds)
            try:
                greeting = receive(link, len(MAGIC) + CHALLENGE_BYTES)
                if not greeting.startswith(MAGIC):
                    raise ProtocolError("what listens there is no data link of this version")
                link.sendall(proof(secret, bytes(greeting[len(MAGIC) :])))
                link.settimeout(self._seconds)
            except (OSError, ProtocolError):
                link.close()
                raise
            self._links[address] = link
        return self._links[address]
