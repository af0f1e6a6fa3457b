"""Blocks as values of a backend: each says which block it is, so that a store need not trust what it is given.

VALUE_MAGIC, the key of the block (32 bytes), its checksum (4 bytes, big-endian), its bytes
"""

from __future__ import annotations

import struct

from services.store.backends.interface import Value
from shared.data_link.frames import KEY_BYTES, checksum
from shared.data_link.server import HeldBlock

VALUE_MAGIC = b"PGVALUE1"

_HEADER = struct.Struct(f"!8s{KEY_BYTES}sI")
SEAL_BYTES = _HEADER.size


def sealed(key: bytes, block: HeldBlock) -> list[Value]:
    """The parts of a block's value."""
    wanted, data = block
    return [_HEADER.pack(VALUE_MAGIC, key, wanted), data]


def unsealed(key: bytes, value: Value, block_bytes: int) -> HeldBlock | None:
    """None where a value is not that block in this size, byte for byte as it was put."""
    if len(value) != SEAL_BYTES + block_bytes:
        return None
    magic, own, wanted = _HEADER.unpack_from(value)
    data = memoryview(value)[SEAL_BYTES:]
    is_whole = magic == VALUE_MAGIC and own == key and checksum(data) == wanted
    return (wanted, data) if is_whole else None
