"""Arrivals of real services, as published: Mooncake's and Azure's, scaled to what is served."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from itertools import count as counting
from pathlib import Path

import msgspec

from shared.workload.requests import BlockPrompt, LoadRequest

MOONCAKE_BLOCK = 512  # tokens under one hash id
UNSHARED_BLOCK = 512  # of a trace that names no contents
UNSHARED_NAMES = 1 << 40  # beyond any name that a trace gives


class TraceEntry(msgspec.Struct, frozen=True):
    """One line of a trace.  `names` are those of its prompt's blocks, or None where the trace says nothing of them."""

    time: float  # seconds after the first
    num_prompt_tokens: int
    num_output_tokens: int
    names: list[int] | None = None


class Trace(msgspec.Struct, frozen=True):
    """The whole of a trace, in order of arrival."""

    entries: list[TraceEntry]

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to one mean gap after the last."""
        last = self.entries[-1].time
        return last + (last / (len(self.entries) - 1) if len(self.entries) > 1 else 1.0)

    def requests(
        self, count: int = 0, *, speed: float = 1.0, length_scale: float = 1.0, longest: int = 0
    ) -> Iterator[LoadRequest]:
        """`count` requests (0: as many as there are), at `speed` times the traced rate.

        Lengths are multiplied by `length_scale`, block sizes too, so that the same shares of prompts are shared; then
        an output is cut to half of `longest`, and its prompt to the rest of that (0: neither).  Past its end the trace
        begins anew with other contents.
        """
        if min(speed, length_scale) <= 0:
            raise ValueError(f"speed and length scale must be positive, got {speed} and {length_scale}")
        left = count or len(self.entries)
        for lap in counting():
            for index, entry in enumerate(self.entries):
                if not left:
                    return
                left -= 1
                max_tokens = max(1, round(entry.num_output_tokens * length_scale))
                if longest:
                    max_tokens = min(max_tokens, longest // 2)
                prompt = self._prompt(index, entry, lap, length_scale, longest and longest - max_tokens)
                time = (lap * self.duration + entry.time) / speed
                yield LoadRequest(prompt, prompt.num_tokens, max_tokens, time)

    def _prompt(self, index: int, entry: TraceEntry, lap: int, scale: float, longest: int) -> BlockPrompt:
        length = max(1, round(entry.num_prompt_tokens * scale))
        size = max(1, round((MOONCAKE_BLOCK if entry.names is not None else UNSHARED_BLOCK) * scale))
        names = entry.names
        if names is None:
            first = UNSHARED_NAMES + (index << 16)
            names = list(range(first, first - (-length // size)))
        length = min(length, longest or length, size * len(names))
        return BlockPrompt(length, size, names, lap)


def read_trace(path: Path) -> Trace:
    """A file in Mooncake's format (.jsonl) or Azure's (.csv).  Raises ValueError naming file and line."""
    read = _mooncake if path.suffix == ".jsonl" else _azure
    entries = sorted(read(path), key=lambda entry: entry.time)
    if not entries:
        raise ValueError(f"{path} has no requests")
    first = entries[0].time
    return Trace([msgspec.structs.replace(entry, time=entry.time - first) for entry in entries])


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int]


def _mooncake(path: Path) -> Iterator[TraceEntry]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            read = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        yield TraceEntry(read.timestamp / 1000, read.input_length, read.output_length, read.hash_ids)


def _azure(path: Path) -> Iterator[TraceEntry]:
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                time = _seconds(row["TIMESTAMP"])
                yield TraceEntry(time, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def _seconds(stamp: str) -> float:
    """Of `2023-11-16 18:17:03.9799600`: Python reads six digits of a fraction, the trace has seven."""
    whole, _, fraction = stamp.strip().partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")
