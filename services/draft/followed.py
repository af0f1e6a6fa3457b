"""One sequence that a draft model follows, and the blocks that hold its keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.draft.ending import Ending
from shared.messages import DraftDistribution


@dataclass(slots=True)
class Followed:
    """Its tokens are in the row table: first the committed ones, then the guess."""

    ending: Ending
    num_told: int
    guess: list[int] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)  # of the guess: one per token, or none
    block_ids: list[int] = field(default_factory=list)
    is_blocked: bool = False  # no block was free for it; until more tokens are committed
    is_over: bool = False  # nothing can follow its committed and guessed tokens

    def __post_init__(self) -> None:
        self.is_over = self.num_told >= self.ending.max_length

    def num_confirmed(self, token_ids: list[int]) -> int:
        """Number of these tokens with which the guess begins."""
        if self.guess[: len(token_ids)] == token_ids:
            return len(token_ids)
        pairs = zip(self.guess, token_ids, strict=False)
        return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), len(self.guess))

    def confirm(self, num_tokens: int) -> None:
        """The first `num_tokens` tokens of the guess were committed."""
        del self.guess[:num_tokens]
        del self.distributions[:num_tokens]
        self.num_told += num_tokens

    def correct(self, num_tokens: int) -> None:
        """`num_tokens` tokens were committed in place of the guess."""
        self.guess.clear()
        self.distributions.clear()
        self.num_told += num_tokens
        self.is_over = self.num_told >= self.ending.max_length

    def go_on(self, token_id: int, distributions: list[DraftDistribution]) -> None:
        """Guess one token more; one distribution, or none."""
        self.guess.append(token_id)
        self.distributions += distributions
        self.is_over = not self.ending.follows(token_id, self.num_told + len(self.guess))
