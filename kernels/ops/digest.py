"""Sums that tell one content of rows from another, at the speed of the cache; not against one who wants them equal.

A row is cut into pieces of 2,048 words of 16 bits with a sign; the last is filled up with zeros.  A piece's sum is that
of its words times keys, mod 2^32; the keys are odd, and no two are the same.  All pieces of all rows are numbered; to
word p mod 4 of the result, piece p adds its sum times an odd factor, a number of splitmix64, mod 2^64.  Sums are added
in any order, by several threads.

A change of one word of a piece always changes the result, and so do two words that change places: their differences and
those of keys are less than 2^16.  That other changes of several words cancel each other has a chance of about 2^-32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORDS = 4  # PG_DIGEST_WORDS
PIECE = 2048  # words of 16 bits
AT_ONCE = 1 << 20  # bytes of rows, so that what is in between stays in the cache

Sums = NDArray[np.uint64]  # [WORDS], or those of several tensors [n, WORDS]


def splitmix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014."""
    z = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def _keys() -> NDArray[np.int16]:  # [PIECE]
    x = (np.arange(PIECE) * 23167 + 9377) % (1 << 15)
    x = (x ^ x >> 7) * 19391 % (1 << 15)
    return (2 * (x ^ x >> 8) + 1).astype(np.int16)


KEYS = _keys()
ODD = np.uint64(1)
_COLUMN = KEYS.astype(np.float64)  # sums of products stay below 2^53, so they are exact


def row_sums(
    rows: NDArray[np.uint8],  # [n, num_bytes]
) -> Sums:
    n, num_bytes = rows.shape
    sums = np.zeros(WORDS, np.uint64)
    if not num_bytes:
        return sums
    multiple = 2 * PIECE if num_bytes > 2 * PIECE else 2
    pieces = -(-num_bytes // (2 * PIECE))  # of a row
    many = max(1, AT_ONCE // num_bytes)
    for begin in range(0, n, many):
        part = rows[begin : begin + many]
        if num_bytes % multiple:
            part = np.pad(part, ((0, 0), (0, -num_bytes % multiple)))
        words = np.ascontiguousarray(part).view(np.int16).reshape(len(part) * pieces, -1)
        found = (words.astype(np.float64) @ _COLUMN[: words.shape[1]]).astype(np.int64) & 0xFFFFFFFF  # [pieces]
        numbers = np.arange(begin * pieces, begin * pieces + len(words), dtype=np.uint64)
        products = found.astype(np.uint64) * (splitmix(numbers) | ODD)
        for first in range(min(4, len(numbers))):
            place = int(numbers[first]) % 4
            sums[place : place + 1] += products[first::4].sum(dtype=np.uint64)
    return sums
