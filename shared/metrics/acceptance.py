"""What speculation yields."""

from __future__ import annotations

import msgspec


class Acceptance(msgspec.Struct, frozen=True):
    """Counts over a run: drafts verified, tokens proposed in them, tokens accepted, and these by position."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = []

    @property
    def rate(self) -> float:
        """Accepted / proposed."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def length(self) -> float:
        """Tokens that a verification yields on average: its accepted ones and the one sampled after them."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def rates_per_position(self) -> list[float]:
        """The share of drafts of which the token at each position was accepted."""
        return [count / self.num_drafts for count in self.num_accepted_per_position] if self.num_drafts else []

    def since(self, earlier: Acceptance) -> Acceptance:
        """The counts between two moments."""
        before = earlier.num_accepted_per_position
        padded = before + [0] * (len(self.num_accepted_per_position) - len(before))
        return Acceptance(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            [now - then for now, then in zip(self.num_accepted_per_position, padded, strict=True)],
        )
