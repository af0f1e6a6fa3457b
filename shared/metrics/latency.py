"""When one request's outputs came, and the latencies that follow from it."""

from __future__ import annotations

import msgspec


class Timeline(msgspec.Struct, gc=False):
    """One request: its start, and each output's time with the number of tokens in it.

    An output is what arrives at once: a token, or several that a server sent in one message.  Times are seconds of one
    clock.  What needs an output that has not come is NaN-free: it is None.
    """

    start: float
    times: list[float] = []  # of outputs, in order
    counts: list[int] = []  # tokens in each, parallel to times

    def add(self, time: float, num_tokens: int = 1) -> None:
        """Note an output."""
        self.times.append(time)
        self.counts.append(num_tokens)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.times[0] - self.start if self.times else None

    @property
    def e2el(self) -> float | None:
        """End-to-end latency."""
        return self.times[-1] - self.start if self.times else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: gaps between outputs, as a reader sees them.  Pool them over requests."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def tbt(self) -> list[float]:
        """Time between tokens: as `itl`, but one gap per token, zero for those that came together."""
        gaps: list[float] = []
        for index, count in enumerate(self.counts):
            first = [self.times[index] - self.times[index - 1]] if index else []
            gaps += first + [0.0] * (count - 1)
        return gaps

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, (E2EL - TTFT) / (n - 1); None below two tokens."""
        return tpot(self.ttft, self.e2el, self.num_tokens)

    @property
    def tpot_with_first(self) -> float | None:
        """The other definition: E2EL / n."""
        return self.e2el / self.num_tokens if self.e2el is not None and self.num_tokens else None


def tpot(ttft: float | None, e2el: float | None, num_tokens: int) -> float | None:
    """(E2EL - TTFT) / (n - 1), in the unit of both; None where there are not two tokens."""
    if ttft is None or e2el is None or num_tokens < 2:
        return None
    return (e2el - ttft) / (num_tokens - 1)
