"""What one step of a worker computes, and the record of one that ran."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import msgspec


class StepWork(msgspec.Struct, gc=False):
    """Sums over a step's sequences."""

    num_tokens: int  # computed
    num_sequences: int
    num_samples: int
    num_context: int  # tokens whose keys and values are read: of each sequence all up to its last
    num_pairs: int  # (query, key): a token meets all before it and itself


class RecordedStep(msgspec.Struct, frozen=True):
    """One line of a worker's recording."""

    num_tokens: int
    num_sequences: int
    num_samples: int
    num_context: int
    num_pairs: int
    start: float  # seconds of the worker's own clock
    seconds: float

    @property
    def work(self) -> StepWork:
        return StepWork(self.num_tokens, self.num_sequences, self.num_samples, self.num_context, self.num_pairs)


def work_of_columns(computed: Sequence[int], scheduled: Sequence[int], num_samples: int) -> StepWork:
    """Of a plan's parallel columns, one entry for each sequence: tokens before the step, tokens in it."""
    num_tokens = sum(scheduled)
    squares = sum(map(mul, scheduled, scheduled))
    num_pairs = sum(map(mul, computed, scheduled)) + (squares + num_tokens) // 2
    return StepWork(num_tokens, len(scheduled), num_samples, sum(computed) + num_tokens, num_pairs)
