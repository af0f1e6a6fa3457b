"""Requests of random lengths, with a prefix that all share."""

from __future__ import annotations

from random import Random

import msgspec

from shared.packing import pack_tokens
from shared.workload.prompts import FIRST_TOKEN, TokenPrompt
from shared.workload.requests import LoadRequest


class RandomLengths(msgspec.Struct, frozen=True):
    """Lengths in tokens; the prompt is the shared prefix and `input_len` tokens of its own.

    Own length and output are drawn uniformly from length x [1 - range_ratio, 1 + range_ratio], each at least 1.
    """

    input_len: int = 1024
    output_len: int = 128
    prefix_len: int = 0
    range_ratio: float = 0.0


def random_requests(count: int, lengths: RandomLengths, vocab_size: int, rng: Random) -> list[LoadRequest]:
    """`count` requests, all at time 0.  Raises ValueError on a ratio outside [0, 1) or a length below 1."""
    if not 0 <= lengths.range_ratio < 1:
        raise ValueError(f"random-range-ratio must be in [0, 1), got {lengths.range_ratio}")
    if min(lengths.input_len, lengths.output_len) < 1 or lengths.prefix_len < 0:
        raise ValueError(f"lengths must be at least 1, and that of the prefix not negative: {lengths}")
    prefix = _tokens(lengths.prefix_len, vocab_size, rng)
    requests = []
    for _ in range(count):
        own = _tokens(_draw(lengths.input_len, lengths.range_ratio, rng), vocab_size, rng)
        max_tokens = _draw(lengths.output_len, lengths.range_ratio, rng)
        requests.append(LoadRequest(TokenPrompt(pack_tokens(prefix + own)), len(prefix) + len(own), max_tokens))
    return requests


def _draw(length: int, ratio: float, rng: Random) -> int:
    low, high = int(length * (1 - ratio)), round(length * (1 + ratio))
    return max(1, rng.randint(low, max(low, high)))


def _tokens(count: int, vocab_size: int, rng: Random) -> list[int]:
    first = min(FIRST_TOKEN, vocab_size - 1)
    return rng.choices(range(first, vocab_size), k=count)
