"""How often draft tokens are accepted."""

from __future__ import annotations

from dataclasses import dataclass

# The values that predict the next verification best, by the likelihood of 8,000 of the bundled pair's; it is flat.
PRIOR_WEIGHT = 24.0  # draft tokens
KEPT = 0.9  # per verification, of what a sequence's were before
KEPT_OF_ALL = 0.998  # of all sequences'


@dataclass(slots=True)
class AcceptanceRate:
    """How often draft tokens are accepted: a moving average; the share of all sequences stands in for missing data."""

    num_tried: float = 0.0  # draft tokens that were looked at: those accepted, and the first that was not
    num_accepted: float = 0.0
    kept: float = KEPT

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        num_tried = num_accepted + (num_accepted < num_draft_tokens)
        self.num_tried = self.kept * self.num_tried + num_tried
        self.num_accepted = self.kept * self.num_accepted + num_accepted

    def share(self, prior: float) -> float:
        return (self.num_accepted + PRIOR_WEIGHT * prior) / (self.num_tried + PRIOR_WEIGHT)
