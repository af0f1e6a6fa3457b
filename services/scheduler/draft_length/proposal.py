"""What a draft proposed for one sequence, and what of it can be verified."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import DraftDistribution


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """What may follow the first `num_tokens` tokens of a sequence."""

    num_tokens: int
    token_ids: list[int]
    distributions: list[DraftDistribution]  # one per token, or none

    def behind(self, token_ids: list[int]) -> VerifiableDrafts | None:
        """What of it still follows these, all that a sequence has; None: it does not agree with them."""
        num_known = len(token_ids) - self.num_tokens
        if token_ids[self.num_tokens :] != self.token_ids[:num_known]:
            return None
        return VerifiableDrafts(self.token_ids[num_known:], self.distributions[num_known:])


@dataclass(slots=True)
class VerifiableDrafts:
    """What can be verified next: proposed tokens that follow what is known."""

    token_ids: list[int] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)

    def first(self, count: int) -> VerifiableDrafts:
        return VerifiableDrafts(self.token_ids[:count], self.distributions[:count])


NO_DRAFTS = VerifiableDrafts()  # never written to
