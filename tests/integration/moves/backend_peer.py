"""A store's blocks, kept in a backend by a process of its own.

python -m tests.integration.moves.backend_peer URL COUNT BYTES

It says how many blocks the backend took, and stays until its input ends: some backends keep values in their clients.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

from services.store.arena import BlockArena
from services.store.backends.addresses import backend_at
from services.store.backends.blocks import BackendBlocks
from shared.data_link.frames import checksum
from shared.data_link.server import HeldBlock

SPACE = b"peer" * 4
PATIENCE = 30.0  # seconds that an answer may take on a busy machine


def block(index: int, size: int) -> tuple[bytes, HeldBlock]:
    """A name and bytes that both sides know."""
    name = hashlib.blake2b(f"name {index}".encode(), digest_size=16).digest()
    seed = hashlib.blake2b(f"bytes {index}".encode()).digest()
    data = bytearray(seed * (size // len(seed)))
    return name, (checksum(data), data)


def store_at(url: str) -> BlockArena:
    """A store with room in its backend alone, but for what is on its way there."""
    return BlockArena(1 << 30, backend=BackendBlocks(backend_at(url), 1 << 30, PATIENCE))


def main(url: str, count: int, size: int) -> None:
    store = store_at(url)
    blocks = [block(index, size) for index in range(count)]
    begun = time.monotonic()
    for name, one in blocks:
        store.keep(SPACE, name, one)
    assert store.backend is not None
    while store.backend.num_put < count and not store.backend.num_failed and time.monotonic() < begun + 2 * PATIENCE:
        time.sleep(0.001)
    said = {"put": store.backend.num_put, "seconds": time.monotonic() - begun}
    print(json.dumps(said), flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
