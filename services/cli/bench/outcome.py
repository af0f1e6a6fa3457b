"""What became of one request, as its client saw it."""

from __future__ import annotations

import msgspec

from shared.metrics import Timeline


class RequestOutcome(msgspec.Struct):
    """Times are seconds of one clock, from the run's start.

    `timeline.start` is when the request was meant to be sent: latencies count from there, so that a client that comes
    late, or waits for a place, hides nothing.  `sent` is when it was.
    """

    timeline: Timeline
    sent: float = 0.0
    late: float = 0.0  # seconds by which the generator itself was behind, without waiting for a place
    end: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    text: str = ""
    error: str = ""
    phases: dict[str, float] = {}  # seconds by phase, where the server was asked and said

    @property
    def succeeded(self) -> bool:
        return not self.error and bool(self.timeline.times)

    @property
    def num_output_tokens(self) -> int:
        return self.timeline.num_tokens
