"""What every way of guessing is to the rest: prompt lookup, a draft model, heads on the target's states one day."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from shared.messages import AdmittedSequence, DraftCapacity, DraftDistribution


class Guess(msgspec.Struct, frozen=True):
    """What may follow the tokens that were told."""

    token_ids: list[int]
    distributions: list[DraftDistribution] = []  # one per token, or none: each was certain


class Proposer(Protocol):
    """Follows sequences by row: opened, told more and more, closed.  Wanted are so many tokens beyond what was told.

    `open` and `commit` raise ProtocolError where a row cannot be followed; it is closed then.
    """

    capacity: DraftCapacity

    def reset(self) -> None:
        """Close every row."""

    def open(self, sequence: AdmittedSequence) -> None:
        """Follow a sequence in a row that is closed."""

    def close(self, row: int) -> None: ...

    def commit(self, row: int, token_ids: list[int]) -> None:
        """These follow, perhaps none.  What they confirm of the guess is no guess any more, and the rest of it stays;
        where they contradict it, it is dropped."""

    def propose(self, goals: Mapping[int, int], rejection: bool) -> int:
        """One piece of work towards guesses of so many tokens, by row: those that nothing keeps waiting come first.
        Returns how many steps it was, one after the other, of at most one token of each row.

        With `rejection`, the same throughout an epoch, tokens are drawn from distributions that are kept beside them.
        """

    def finished(self, row: int, goal: int) -> bool:
        """Whether the guess has so many tokens, or can have no more of them now."""
        ...

    def is_behind(self, row: int) -> bool:
        """Whether so much that was told is yet to be read that others should not wait for it."""
        ...

    def guess(self, row: int, count: int) -> Guess:
        """What there is of the guess, up to `count` tokens."""
        ...
