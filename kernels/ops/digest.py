"""Sums that tell one content of rows from another, at the speed of the cache; not against one who wants them equal.

A row is cut into stripes of 4 times 8 words of 64 bits.  The last stripe ends with the row and may begin within the one
before; a shorter row is filled up with zeros.  A state of as many words begins, with the row's index i and
phi = 0x9E3779B97F4A7C15, with word j = (32 i + j + 1) phi, and takes stripe after stripe, word for word:

    mix(a, m) = (a mod 2^32) * FACTOR  xor  a with its halves exchanged  xor  m

Each word that was taken is multiplied in the next two steps.  At last the first 8 words take the other 24, and
four times zeros.  The sums are those of all rows, mod 2^64, so rows may be added in any order, by several threads.

A change of one word always changes the word of the state that takes it, and stays there but for a chance of about
2^-64; that several changes cancel each other is as unlikely.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORDS = 8  # PG_DIGEST_WORDS
STATE = 4 * WORDS  # words
STRIPE = 8 * STATE  # bytes
PHI, FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x9E3779B1)
LOWER, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
AT_ONCE = 1 << 20  # bytes of rows, so that what is in between stays in the cache

Sums = NDArray[np.uint64]  # [WORDS]
Words = NDArray[np.uint64]


def row_sums(
    rows: NDArray[np.uint8],  # [n, num_bytes]
) -> Sums:
    if rows.shape[1] < STRIPE:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % STRIPE)))
    sums, num_bytes = np.zeros(WORDS, np.uint64), rows.shape[1]
    many = max(1, AT_ONCE // max(1, num_bytes))
    for begin in range(0, len(rows), many):
        part = rows[begin : begin + many]
        index = np.arange(STATE * begin + 1, STATE * (begin + len(part)) + 1, dtype=np.uint64)
        state = (index * PHI).reshape(len(part), STATE)
        for end in range(STRIPE, num_bytes + STRIPE, STRIPE):
            end = min(end, num_bytes)
            state = _mix(state, part[:, end - STRIPE : end].copy().view(np.uint64))
        sums += _fold(state).sum(axis=0, dtype=np.uint64)
    return sums


def _mix(state: Words, words: Words) -> Words:
    mixed = state & LOWER
    mixed *= FACTOR
    mixed ^= state >> HALF
    mixed ^= state << HALF
    mixed ^= words
    return mixed


def _fold(
    state: Words,  # [n, STATE]
) -> Words:  # [n, WORDS]
    folded, *others = np.split(state, STATE // WORDS, axis=1)
    for words in (*others, *[np.zeros_like(folded)] * 4):
        folded = _mix(folded, words)
    return folded
