"""What passes a data link.

    store  -> worker   MAGIC, 16 bytes that differ with every connection
    worker -> store    their keyed digest, by the store's secret: the secret itself does not pass
    store  -> worker   READY; on one host with the descriptor of memory that both map (`window.py`)
    worker -> store    a request, as often as wanted: header, names; with PUT also checksums and bytes of the blocks
    store  -> worker   PUT: how many of them are kept, the first ones
                       GET: group after group, up to one that lacks blocks: how many, their checksums, their bytes
    worker -> store    where the bytes of a whole group passed through memory: DONE, once they are copied from there

Integers are big-endian.  Each block has a checksum of its own, made where the block was computed and checked wherever
it arrives: CRC-32, as zlib computes it.  Across hosts a data link shows who connects and hides nothing: use it in a
network of your own.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ProtocolError

try:
    from deflate import crc32  # libdeflate: by the processor's widest products without carries, 7 to 20 times as fast
except ImportError:  # there is no wheel for this platform
    from zlib import crc32  # type: ignore[assignment]

MAGIC = b"PGBLOCK2"
DONE = b"\1"
CHALLENGE_BYTES = 16
PROOF_BYTES = 32
SPACE_BYTES = NAME_BYTES = 16
KEY_BYTES = SPACE_BYTES + NAME_BYTES
PUT, GET = 1, 2
MAX_BLOCKS = 1024  # of one request
MAX_BLOCK_BYTES = 64 << 20
MAX_PUT_BYTES = 256 << 20
GROUP_BYTES = 1 << 20  # of an answer: what came with one is used while the next ones come, and is in the cache still

_HEADER = struct.Struct("!BxxxII16s")  # kind, number of blocks, bytes of each, space
_COUNT = struct.Struct("!I")

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class BlockRequest:
    kind: int
    block_bytes: int
    space: bytes
    names: Sequence[bytes]

    def encode(self) -> bytes:
        return _HEADER.pack(self.kind, len(self.names), self.block_bytes, self.space) + b"".join(self.names)


def proof(secret: bytes, challenge: bytes) -> bytes:
    """What shows that one has the secret."""
    return hashlib.blake2b(challenge, key=secret, digest_size=PROOF_BYTES).digest()


def is_proof(secret: bytes, challenge: bytes, shown: bytes) -> bool:
    return hmac.compare_digest(proof(secret, challenge), shown)


def checksum(block: Bytes) -> int:
    return crc32(block)


def read_request(link: socket.socket) -> BlockRequest | None:
    """None where the other side has closed.  Raises ProtocolError for a request beyond the limits."""
    header = bytearray(_HEADER.size)
    if not _fill(link, memoryview(header), may_end=True):
        return None
    kind, count, block_bytes, space = _HEADER.unpack(header)
    if kind not in (PUT, GET) or not 0 < count <= MAX_BLOCKS or not 0 < block_bytes <= MAX_BLOCK_BYTES:
        raise ProtocolError(f"a request of kind {kind} for {count} blocks of {block_bytes} bytes")
    if kind == PUT and count * block_bytes > MAX_PUT_BYTES:
        raise ProtocolError(f"{count * block_bytes} bytes to keep in one request, more than {MAX_PUT_BYTES}")
    names = bytes(receive(link, count * NAME_BYTES))
    return BlockRequest(kind, block_bytes, space, [names[i : i + NAME_BYTES] for i in range(0, len(names), NAME_BYTES)])


def read_count(link: socket.socket, most: int) -> int:
    """Raises ProtocolError where there are more than can be."""
    (count,) = _COUNT.unpack(receive(link, _COUNT.size))
    if count > most:
        raise ProtocolError(f"an answer of {count} blocks to a request for {most}")
    return int(count)


def send_count(link: socket.socket, count: int) -> None:
    link.sendall(_COUNT.pack(count))


def group_size(block_bytes: int) -> int:
    """How many blocks of a size come at a time."""
    return max(1, GROUP_BYTES // block_bytes)


def groups(names: Sequence[bytes], block_bytes: int) -> list[Sequence[bytes]]:
    """Those that come at a time."""
    size = group_size(block_bytes)
    return [names[start : start + size] for start in range(0, len(names), size)]


def send_group(link: socket.socket, checksums: Sequence[int]) -> None:
    """What precedes the bytes of so many blocks."""
    link.sendall(struct.pack(f"!{1 + len(checksums)}I", len(checksums), *checksums))


def read_checksums(link: socket.socket, count: int) -> tuple[int, ...]:
    return struct.unpack(f"!{count}I", receive(link, 4 * count))


def send_checksums(link: socket.socket, checksums: Sequence[int]) -> None:
    link.sendall(struct.pack(f"!{len(checksums)}I", *checksums))


def send_blocks(link: socket.socket, blocks: Sequence[Bytes]) -> None:
    for block in blocks:
        link.sendall(block)


def receive(link: socket.socket, size: int) -> bytearray:
    """Raises OSError where the other side closes before."""
    data = bytearray(size)
    receive_into(link, memoryview(data))
    return data


def receive_into(link: socket.socket, place: memoryview) -> None:
    """Fill a place of bytes.  Raises OSError where the other side closes before."""
    _fill(link, place, may_end=False)


def _fill(link: socket.socket, place: memoryview, *, may_end: bool) -> bool:
    size, done = len(place), 0
    while done < size:
        count = link.recv_into(place[done:])
        if not count:
            if may_end and not done:
                return False
            raise ConnectionError("the other side of a data link has closed it")
        done += count
    return True
