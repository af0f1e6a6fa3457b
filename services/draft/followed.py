"""One sequence that a draft model follows, and the blocks that hold its keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.draft.ending import Ending
from shared.messages import DraftDistribution


@dataclass(slots=True)
class Followed:
    """Its tokens are in the row table: first those that were told, then the guess."""

    ending: Ending
    num_told: int
    guess: list[int] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)  # of the guess: one per token, or none
    block_ids: list[int] = field(default_factory=list)
    is_blocked: bool = False  # there was no block for it; until more is told

    @property
    def can_go_on(self) -> bool:
        """Whether anything can follow what is told and guessed."""
        if self.guess:
            return self.ending.follows(self.guess[-1], self.num_told + len(self.guess))
        return self.num_told < self.ending.max_length

    def num_confirmed(self, token_ids: list[int]) -> int:
        """How many of these the guess begins with."""
        if self.guess[: len(token_ids)] == token_ids:
            return len(token_ids)
        pairs = zip(self.guess, token_ids, strict=False)
        return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), len(self.guess))

    def confirm(self, num_tokens: int) -> None:
        """The first tokens of the guess were told."""
        del self.guess[:num_tokens]
        del self.distributions[:num_tokens]
        self.num_told += num_tokens

    def drop_guess(self) -> None:
        self.guess.clear()
        self.distributions.clear()
