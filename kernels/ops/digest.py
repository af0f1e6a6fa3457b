"""Sums that tell one content of memory from another, at the speed of memory; not against one who wants them equal.

Memory is cut into chunks of CHUNK bytes, the last one filled up with zeros, and a chunk into 32-bit words m_0, m_1, ...
With fixed keys k_i and a shift s, each chunk has the two sums

    sum over even i of (m_i + k_(i+s) mod 2^32) * (m_(i+1) + k_(i+s+1) mod 2^32)   mod 2^64,   for s = 0 and s = 4

which is NH, the universal hash of UMAC (RFC 4418), twice: two contents that were not made for it agree in both with a
probability of about 2^-64.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 16  # bytes; PG_DIGEST_CHUNK
SHIFT = 4  # words
AT_ONCE = 4  # chunks, so that what is in between stays in the cache
LOWER = np.uint64(0xFFFFFFFF)

Sums = NDArray[np.uint64]  # [num_chunks, 2]


def num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK)


def empty_sums(num_bytes: int) -> Sums:
    """For the sums of so many bytes."""
    return np.empty((num_chunks(num_bytes), 2), np.uint64)


@cache
def key_words() -> NDArray[np.uint32]:
    """Splitmix64 of 1, 2, ...: the lower halves."""
    x = np.arange(1, CHUNK // 4 + SHIFT + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).astype(np.uint32)


def chunk_sums(
    data: NDArray[np.uint8],  # [num_bytes]
) -> Sums:
    sums = empty_sums(len(data))
    for begin in range(0, len(sums), AT_ONCE):
        part = data[begin * CHUNK : (begin + AT_ONCE) * CHUNK]
        if missing := -len(part) % CHUNK:
            part = np.concatenate([part, np.zeros(missing, np.uint8)])
        words = part.view(np.uint32).reshape(-1, CHUNK // 4)
        for column, shift in enumerate((0, SHIFT)):
            pairs = (words + key_words()[shift : shift + CHUNK // 4]).view(np.uint64)
            upper = pairs >> np.uint64(32)
            pairs &= LOWER
            pairs *= upper
            sums[begin : begin + len(words), column] = pairs.sum(axis=1)
    return sums
