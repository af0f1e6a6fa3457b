"""How often draft tokens are accepted."""

from __future__ import annotations

from dataclasses import dataclass

PRIOR_WEIGHT = 4.0  # draft tokens
FORGETTING = 0.9  # per verification, of what was accepted before


@dataclass(slots=True)
class Acceptance:
    """How often draft tokens are accepted: a moving share, that of everyone's standing in for what is not known yet."""

    num_tried: float = 0.0  # draft tokens that were looked at: those accepted, and the first that was not
    num_accepted: float = 0.0

    def record(self, num_draft_tokens: int, num_accepted: int) -> None:
        num_tried = num_accepted + (num_accepted < num_draft_tokens)
        self.num_tried = FORGETTING * self.num_tried + num_tried
        self.num_accepted = FORGETTING * self.num_accepted + num_accepted

    def share(self, prior: float) -> float:
        return (self.num_accepted + PRIOR_WEIGHT * prior) / (self.num_tried + PRIOR_WEIGHT)
