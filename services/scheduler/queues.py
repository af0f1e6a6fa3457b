"""The waiting queue of one worker, most urgent first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.scheduler.sequence import Rank, Sequence


def by_rank(sequence: Sequence) -> Rank:
    return sequence.rank


class WaitingQueue:
    """Sequences that hold nothing, ordered by rank; one that was preempted finds its old place again."""

    def __init__(self) -> None:
        self.num_tokens = 0  # as they were when they came; one that was preempted may still get one or two
        self._sequences: list[Sequence] = []
        self._sizes: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=by_rank)
        self._sizes[sequence] = sequence.num_tokens
        self.num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        self.num_tokens -= self._sizes.pop(sequence)
        del self._sequences[bisect_left(self._sequences, sequence.rank, key=by_rank)]

    def take_all(self) -> list[Sequence]:
        taken, self._sequences = self._sequences, []
        self._sizes.clear()
        self.num_tokens = 0
        return taken
