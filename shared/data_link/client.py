"""A worker's side of data links: asks a store for blocks, or gives it some.  It blocks the thread that calls it."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from shared.data_link.addresses import connected
from shared.data_link.copying import Copy, copy_into
from shared.data_link.frames import (
    CHALLENGE_BYTES,
    DONE,
    GET,
    MAGIC,
    PUT,
    BlockRequest,
    Bytes,
    checksum,
    groups,
    proof,
    read_checksums,
    read_count,
    receive,
    receive_into,
    send_blocks,
    send_checksums,
)
from shared.data_link.window import Window, receive_window
from shared.errors import ProtocolError

SECONDS = 5.0  # that one call of a socket may take
MAX_LINKS = 8


class CorruptBlockError(ProtocolError):
    """A block has other bytes than its checksum says."""


class DataLinks:
    """Connections to stores, each made when it is first wanted and kept; one that fails is closed."""

    def __init__(self, directory: Path, seconds: float = SECONDS, copy: Copy | None = None) -> None:
        """`directory`: the deployment's own; only sockets in it are connected to.  `copy`: how blocks leave the memory
        that both sides map, with their checksums; a way of this package's own where there is none."""
        self._directory = directory
        self._copy = copy or copy_checked
        self._seconds = seconds
        self._links: dict[str, tuple[socket.socket, Window | None]] = {}

    def put(self, address: str, secret: bytes, space: bytes, names: Sequence[bytes], blocks: Sequence[Bytes]) -> int:
        """How many of these blocks of one size, the first ones, the store has now.  Raises OSError, ProtocolError."""
        checksums = [checksum(block) for block in blocks]
        link, _ = self._connection(address, secret)
        try:
            link.settimeout(self._seconds)
            link.sendall(BlockRequest(PUT, len(blocks[0]), space, names).encode())
            send_checksums(link, checksums)
            send_blocks(link, blocks)
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
        """Fill places of one size with blocks; returns how many there were, the first ones.  Raises as `get_groups`."""
        left = iter(places)
        counts = self.get_groups(
            address,
            secret,
            space,
            names,
            len(places[0]),
            lambda count: list(itertools.islice(left, count)),
            lambda _: deadline,
        )
        return sum(counts)

    def get_groups(
        self,
        address: str,
        secret: bytes,
        space: bytes,
        names: Sequence[bytes],
        block_bytes: int,
        places: Callable[[int], Sequence[memoryview]],
        deadline: Callable[[int], float],
    ) -> Iterator[int]:
        """Blocks a group at a time, up to the first that is not there: yields how many have come, in `places` for so
        many that are asked for then.  `deadline`: by time.monotonic, when so many of all must have come.

        Raises OSError (a TimeoutError behind a deadline), ProtocolError, and CorruptBlockError where a block is not
        what its checksum says.  What is not taken to the end costs the connection.
        """
        asked, is_over = groups(names, block_bytes), False
        num_awaited = len(asked[0])
        link, window = self._connection(address, secret, self._time_until(deadline(num_awaited)))
        slots = window.slots(block_bytes) if window is not None else []
        try:
            link.settimeout(self._time_until(deadline(num_awaited)))
            link.sendall(BlockRequest(GET, block_bytes, space, names).encode())
            for index, some in enumerate(asked):
                wait = partial(self._wait, link, deadline(num_awaited))
                wait()
                count = read_count(link, len(some))
                wait()
                checksums = read_checksums(link, count)
                slot = slots[index % len(slots)] if slots else None
                for place, wanted, start in zip(
                    places(len(some)), checksums, itertools.count(0, block_bytes), strict=False
                ):
                    if slot is not None:
                        found = self._copy(place, slot[start : start + block_bytes])
                    else:
                        wait()
                        receive_into(link, place)
                        found = checksum(place)  # at once: it is in the processor's cache
                    if found != wanted:
                        raise CorruptBlockError("a block has other bytes than its checksum says")
                if slot is not None and count == len(some):
                    link.sendall(DONE)
                is_over = count < len(some) or index == len(asked) - 1
                yield count
                if is_over:
                    break
                num_awaited += len(asked[index + 1])
        finally:
            if not is_over:
                self.forget(address)

    def _wait(self, link: socket.socket, deadline: float) -> None:
        """Let the next call of a socket take so long.  Raises TimeoutError."""
        link.settimeout(self._time_until(deadline))

    def _time_until(self, deadline: float) -> float:
        """Seconds that one call of a socket may take.  Raises TimeoutError."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it takes too long")
        return min(left, self._seconds)

    def forget(self, address: str) -> None:
        if (connection := self._links.pop(address, None)) is not None:
            with contextlib.suppress(OSError):
                connection[0].close()

    def close(self) -> None:
        for address in list(self._links):
            self.forget(address)

    def _connection(
        self, address: str, secret: bytes, seconds: float | None = None
    ) -> tuple[socket.socket, Window | None]:
        if address not in self._links:
            while len(self._links) >= MAX_LINKS:
                self.forget(next(iter(self._links)))
            link = connected(address, self._directory, seconds or self._seconds, secret)
            try:
                greeting = receive(link, len(MAGIC) + CHALLENGE_BYTES)
                if not greeting.startswith(MAGIC):
                    raise ProtocolError("what listens there is no data link of this version")
                link.sendall(proof(secret, bytes(greeting[len(MAGIC) :])))
                window = receive_window(link)
            except (OSError, ProtocolError):
                link.close()
                raise
            self._links[address] = link, window
        return self._links[address]


def copy_checked(place: memoryview, source: memoryview) -> int:
    """Fill a place with as many bytes; returns their checksum."""
    copy_into(place, source)
    return checksum(place)
