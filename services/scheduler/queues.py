"""The waiting queue of one worker, most urgent first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from services.scheduler.sequence import Rank, Sequence


def by_rank(sequence: Sequence) -> Rank:
    return sequence.rank


class WaitingQueue:
    """Sequences that hold nothing, ordered by rank; one that was preempted finds its old place again."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=by_rank)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def take_all(self) -> list[Sequence]:
        taken, self._sequences = self._sequences, []
        return taken
