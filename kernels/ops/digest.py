"""Sums that tell one content of rows from another, at the speed of the cache; not against one who wants them equal.

A row is cut into pieces of 2,048 words of 16 bits with a sign; the last is filled up with zeros.  A piece has two
sums, each of its words times odd keys, mod 2^32.  All pieces of all rows are numbered; to the words p mod 4 and
4 + p mod 4 of the result, piece p adds its first and its second sum, times an odd factor of the piece, mod 2^64.  Keys
and factors are numbers of splitmix64.  Sums are added in any order, by several threads.

A change of one word always changes the result, for it is less than 2^16 and what it is multiplied with is odd.  That
the changes of several words of a piece cancel each other in both sums has a chance of 2^-30 at most.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORDS = 8  # PG_DIGEST_WORDS
PIECE = 2048  # words of 16 bits
AT_ONCE = 1 << 20  # bytes of rows, so that what is in between stays in the cache

Sums = NDArray[np.uint64]  # [WORDS]


def splitmix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014."""
    z = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


ODD = np.uint64(1)
KEYS = (splitmix(np.arange(2 * PIECE, dtype=np.uint64)) >> np.uint64(48) | ODD).astype(np.int16).reshape(2, PIECE)
_COLUMNS = np.ascontiguousarray(KEYS.T, np.float64)  # [PIECE, 2]; sums of products stay below 2^53, so they are exact


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
        found = (words.astype(np.float64) @ _COLUMNS[: words.shape[1]]).astype(np.int64) & 0xFFFFFFFF  # [pieces, 2]
        numbers = np.arange(begin * pieces, begin * pieces + len(words), dtype=np.uint64)
        products = found.astype(np.uint64) * (splitmix(numbers) | ODD)[:, None]
        for first in range(min(4, len(numbers))):
            place = int(numbers[first]) % 4
            sums[place::4] += products[first::4].sum(axis=0, dtype=np.uint64)
    return sums
