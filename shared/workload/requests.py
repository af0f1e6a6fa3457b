"""The requests of a workload: random ones, with a prefix that all share, and those of files of JSON lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from shared.packing import pack_tokens
from shared.workload.prompts import FIRST_TOKEN, ChatPrompt, Prompt, TextPrompt, TokenPrompt

FIELDS = ("prompt", "question", "text", "turns")


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
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=dict[str, Any])
            text = _text_of(entry)
            length = int(entry.get("output_tokens") or max_tokens)
        except (ValueError, KeyError) as error:
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
