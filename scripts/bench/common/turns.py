"""Taking turns: the machine's speed drifts, so those that are compared run one after the other, round by round."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from scripts.bench.common.proc import machine_cpu_seconds

NOISE = 0.15  # cores that other processes took: above it a run is noisy

T = TypeVar("T")


def rotated(members: Sequence[T], number: int) -> list[T]:
    """In the order of round `number`: each round begins with another."""
    place = number % max(1, len(members))
    return [*members[place:], *members[:place]]


@contextmanager
def others(own_seconds: Callable[[], float]) -> Iterator[list[float]]:
    """At the end of the block the list has one entry: the cores that other processes took meanwhile.

    `own_seconds` is the processor time so far of those that are measured.
    """
    found: list[float] = []
    begin, own, machine = time.perf_counter(), own_seconds(), machine_cpu_seconds()
    yield found
    taken = (machine_cpu_seconds() - machine) - (own_seconds() - own)
    found.append(max(0.0, taken / (time.perf_counter() - begin)))


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / smallest."""
    return (max(values) - min(values)) / min(values)


def say(text: str) -> None:
    """Progress, beside the table on standard output."""
    print(text, file=sys.stderr, flush=True)


def today() -> str:
    return time.strftime("%Y-%m-%d")
