"""The interface of all ways to propose tokens: prompt lookup, and a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from shared.messages import AdmittedSequence, DraftCapacity, DraftDistribution


class Guess(msgspec.Struct, frozen=True):
    """Tokens that may follow the committed ones."""

    token_ids: list[int]
    distributions: list[DraftDistribution] = []  # one per token, or none: each was certain


class Proposer(Protocol):
    """Follows sequences by row: opens, extends and closes them.  A goal counts tokens beyond the committed ones.

    `open` and `commit` raise ProtocolError where a row cannot be followed; it is closed then.
    """

    capacity: DraftCapacity

    def reset(self) -> None:
        """Close every row."""

    def open(self, sequence: AdmittedSequence) -> None:
        """Follow a sequence in a row that is closed."""

    def close(self, row: int) -> None: ...

    def commit(self, row: int, token_ids: list[int]) -> None:
        """Commit these tokens, perhaps none.  Where they confirm the guess its rest stays, else it is dropped."""

    def propose(self, goals: Mapping[int, int], rejection: bool) -> int:
        """One piece of work towards guesses of so many tokens, by row: those that nothing keeps waiting come first.
        Returns how many steps it was, one after the other, of at most one token of each row.

        With `rejection`, the same throughout an epoch, tokens are drawn from distributions that are kept beside them.
        """

    def finished(self, row: int, goal: int) -> bool:
        """Whether the guess has so many tokens, or can have no more of them now."""

    def is_behind(self, row: int) -> bool:
        """Whether so many committed tokens are not computed yet that other rows should not wait for this one."""

    def guess(self, row: int, count: int) -> Guess:
        """The first `count` tokens of the guess, or all where it is shorter."""
