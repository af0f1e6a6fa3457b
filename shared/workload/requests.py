"""The requests of a workload: what they begin with, how long they are, and when they arrive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import shake_128
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from shared.packing import pack_tokens, unpack_tokens

LARGE_VOCABULARY = 1 << 16
BYTE_VOCABULARY = 1 << 8
FIRST_TOKEN = 16  # below are, by custom, the special ones
ORDINARY_BYTES = bytes(FIRST_TOKEN + byte % (BYTE_VOCABULARY - FIRST_TOKEN) for byte in range(BYTE_VOCABULARY))
FIELDS = ("prompt", "question", "text", "turns")


class TextPrompt(msgspec.Struct, frozen=True):
    """For a server that tokenizes."""

    text: str


class ChatPrompt(msgspec.Struct, frozen=True):
    """One user's turn, for a server with a chat template."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True):
    """Token ids as they are, packed int32."""

    packed: bytes

    def token_ids(self, vocab_size: int) -> bytes:
        return self.packed


class BlockPrompt(msgspec.Struct, frozen=True):
    """Contents that a trace knows by the names of its blocks only: equal names are equal tokens, others differ.

    Block b's tokens are a hash of its name, so two prompts share exactly the prefix that the traced ones shared.
    """

    num_tokens: int
    block_size: int  # tokens in each block
    block_names: list[int]
    salt: int = 0  # changes all names: the same trace once more, without a prefix shared with the first

    def token_ids(self, vocab_size: int) -> bytes:
        """Packed int32, `num_tokens` of them, all in [0, vocab_size)."""
        parts = (block_tokens(name, self.salt, self.block_size, vocab_size) for name in self.block_names)
        return b"".join(parts)[: 4 * self.num_tokens]


Prompt = TextPrompt | ChatPrompt | TokenPrompt | BlockPrompt


@lru_cache(maxsize=1 << 14)
def block_tokens(name: int, salt: int, size: int, vocab_size: int) -> bytes:
    """`size` packed token ids that are a function of name and salt, none special where the vocabulary allows."""
    wide = bytearray(4 * size)
    if vocab_size == BYTE_VOCABULARY:
        wide[0::4] = shake_128(b"%d.%d" % (name, salt)).digest(size).translate(ORDINARY_BYTES)
        return bytes(wide)
    digest = shake_128(b"%d.%d" % (name, salt)).digest(2 * size)
    wide[0::4], wide[1::4] = digest[0::2], digest[1::2]
    if vocab_size >= LARGE_VOCABULARY:
        return bytes(wide)
    first = min(FIRST_TOKEN, vocab_size - 1)
    span = vocab_size - first
    return pack_tokens([first + value % span for value in unpack_tokens(bytes(wide))])


class LoadRequest(msgspec.Struct, frozen=True):
    """`num_prompt_tokens` is 0 where only the server can know it (text)."""

    prompt: Prompt
    num_prompt_tokens: int
    max_tokens: int
    time: float = 0.0  # seconds after the start at which it is meant to be sent
    tenant: str = ""


def at_times(requests: Sequence[LoadRequest], times: Iterable[float]) -> list[LoadRequest]:
    """The same requests, sent at these times.  Raises ValueError where there are not as many times."""
    pairs = zip(requests, times, strict=True)
    return [msgspec.structs.replace(request, time=time) for request, time in pairs]


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


def read_prompts(path: Path, max_tokens: int, *, chat: bool = False) -> list[LoadRequest]:
    """One request for each line, all at time 0; of several turns the first.

    A line is an object with the prompt under `prompt`, `question`, `text` or `turns`, and may say `output_tokens`.
    Raises ValueError naming file and line where it is not.
    """
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=dict[str, Any])
            text = _text_of(entry)
            length = int(entry.get("output_tokens") or max_tokens)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        requests.append(LoadRequest(ChatPrompt(text) if chat else TextPrompt(text), 0, length))
    return requests


def _text_of(entry: dict[str, Any]) -> str:
    name = next((name for name in FIELDS if entry.get(name)), None)
    if name is None:
        raise ValueError(f"has none of {', '.join(FIELDS)}")
    value = entry[name][0] if isinstance(entry[name], list) else entry[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value


class Ramp(msgspec.Struct, frozen=True):
    """A rate that grows from the first request to the last, in requests per second."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def rate_at(self, progress: float) -> float:
        """The rate when this share (0 ... 1) of the requests has been sent."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * math.pow(self.end / self.start, progress)


def arrival_times(count: int, rate: float, burstiness: float, rng: Random) -> list[float]:
    """`count` times at `rate` per second.

    rate inf: all at once.  Gaps are gamma distributed with shape `burstiness` and mean 1 / rate: 1 is a Poisson
    process, less is burstier, inf has constant gaps.  As vLLM's `bench serve` does it, the times are then stretched so
    that the last one is count / rate: every run has exactly the rate that was asked for.
    Raises ValueError unless both numbers are positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"rate and burstiness must be positive, got {rate} and {burstiness}")
    if math.isinf(rate):
        return [0.0] * count
    times = list(accumulate(_gap(rate, burstiness, rng) for _ in range(count)))
    factor = count / rate / times[-1] if times and times[-1] > 0 else 1.0
    return [time * factor for time in times]


def ramp_times(count: int, ramp: Ramp, burstiness: float, rng: Random) -> list[float]:
    """`count` times whose rate follows a ramp; the gap before each is drawn at the rate of its place."""
    if not min(ramp.start, ramp.end, burstiness) > 0:
        raise ValueError(f"rates and burstiness must be positive, got {ramp} and {burstiness}")
    last = max(count - 1, 1)
    return list(accumulate(_gap(ramp.rate_at(index / last), burstiness, rng) for index in range(count)))


def _gap(rate: float, burstiness: float, rng: Random) -> float:
    if math.isinf(burstiness):
        return 1 / rate
    return rng.gammavariate(burstiness, 1 / (rate * burstiness))
