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


@dataclass(slots=True)
class VerifiableDrafts:
    """What can be verified next: proposed tokens that follow what is known."""

    token_ids: list[int] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)

    def first(self, count: int) -> VerifiableDrafts:
        return VerifiableDrafts(self.token_ids[:count], self.distributions[:count])


NO_DRAFTS = VerifiableDrafts()  # never written to
