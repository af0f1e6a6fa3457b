"""Counter-based Gumbel noise: a pure function of (seed, position, token id), the same in every process.

Two 32-bit words are hashed from the 64-bit seed and the position of the token to be sampled, once per row; each
candidate token then costs two rounds more.  All arithmetic is modulo 2**32, done here in int64 under a mask, so
that a kernel with uint32 registers gives the same bits.  The round is the 32-bit finaliser of MurmurHash3.

    u = (hash >> 8 + 1/2) / 2**24      in the open interval (0, 1)
    noise = -log(-log(u))              float64, within [MIN_NOISE, MAX_NOISE]

A position at which more is drawn than its token takes the rest from streams of their own: the seed with a constant
XORed into it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
UNIT = 2.0**-24
MIN_NOISE = -math.log(-math.log(0.5 * UNIT))  # about -2.85
MAX_NOISE = -math.log(-math.log1p(-0.5 * UNIT))  # about 17.33
FIRST_KEY = 0x9E3779B9
SECOND_KEY = 0x7F4A7C15
TOKEN_STEP = 0x9E3779B1
ACCEPT_STREAM = 0x3C6EF372FE94F82B  # whether a draft token is accepted
RECOVER_STREAM = 0x510E527FADE682D1  # the token in place of a rejected one
DRAFT_STREAM = 0x1F83D9ABFB41BD6B  # what a draft proposes, where acceptance is not by equality


def row_keys(
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64
) -> tuple[Tensor, Tensor]:  # two words of 32 bits, each [num_rows] int64
    low, high = seeds & MASK, (seeds >> 32) & MASK
    first = mix(mix(mix(low ^ FIRST_KEY) + high & MASK) + positions & MASK)
    second = mix(mix(mix(high ^ SECOND_KEY) + low & MASK) ^ positions & MASK)
    return first, second


def token_bits(
    first: Tensor,  # [n] int64, below 2**32
    second: Tensor,  # [n] int64, below 2**32
    token_ids: Tensor,  # [n] int64
) -> Tensor:  # [n] int64, below 2**32
    return mix(mix(first ^ (token_ids * TOKEN_STEP & MASK)) + second & MASK)


def uniform_noise(
    first: Tensor,  # [n] int64, below 2**32
    second: Tensor,  # [n] int64, below 2**32
    token_ids: Tensor,  # [n] int64
) -> Tensor:  # [n] float64, in the open interval (0, 1)
    return ((token_bits(first, second, token_ids) >> 8).double() + 0.5) * UNIT


def gumbel_noise(
    first: Tensor,  # [n] int64, below 2**32
    second: Tensor,  # [n] int64, below 2**32
    token_ids: Tensor,  # [n] int64
) -> Tensor:  # [n] float64
    return -torch.log(-torch.log(uniform_noise(first, second, token_ids)))


def mix(
    word: Tensor,  # [n] int64, below 2**32
) -> Tensor:  # [n] int64, below 2**32: each bit depends on every bit
    word = (word ^ (word >> 16)) * 0x85EBCA6B & MASK
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & MASK
    return word ^ (word >> 16)
