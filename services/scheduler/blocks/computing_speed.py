"""How fast a worker computes, by its steps of late: what fetching its blocks is compared with."""

from __future__ import annotations

MEASURABLE = 64  # tokens of a step from which a worker's speed is taken
WEIGHT = 0.3  # of the newest such step


class ComputingSpeed:
    """Of one worker's life."""

    def __init__(self) -> None:
        self.tokens_per_second = 0.0  # of prompts; 0: not known
        self.longest_step = 0.0  # seconds, of late

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has taken so long."""
        if seconds <= 0.0:
            return
        self.longest_step = max(seconds, self.longest_step * 0.9)
        if num_tokens >= MEASURABLE:
            rate, known = num_tokens / seconds, self.tokens_per_second
            self.tokens_per_second = known + WEIGHT * (rate - known) if known else rate

    def seconds_for(self, num_tokens: int) -> float:
        """0: not known."""
        return num_tokens / self.tokens_per_second if self.tokens_per_second else 0.0
