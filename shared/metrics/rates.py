"""Rates over a run and its busiest moments: throughput, use of the device, acceptance of drafts, objectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

NAMES = ("ttft", "tpot", "e2el")


def rate(count: float, seconds: float) -> float:
    """Per second: requests give RPS (QPS), tokens give TPS; 0 where no time has passed."""
    return count / seconds if seconds > 0 else 0.0


def per_minute(count: float, seconds: float) -> float:
    """Per minute: requests give QPM."""
    return 60 * rate(count, seconds)


def serial_rate(latencies: Iterable[float]) -> float:
    """QPS of a client that asks one at a time: requests / sum of their latencies (seconds)."""
    listed = list(latencies)
    return rate(len(listed), sum(listed))


def peak_rate(events: Iterable[tuple[float, int]], window: float = 1.0) -> float:
    """The largest count per second among windows of the run laid end to end from time 0; events are (time, count)."""
    buckets: Counter[int] = Counter()
    for time, count in events:
        buckets[int(time // window)] += count
    return max(buckets.values(), default=0) / window


def peak_concurrency(spans: Iterable[tuple[float, float]]) -> int:
    """The most (start, end) spans that were open at one moment; one that ends as another starts leaves it room."""
    changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
    highest = now = 0
    for _, change in changes:
        now += change
        highest = max(highest, now)
    return highest


class ModelWork(msgspec.Struct, frozen=True):
    """What a model's tokens cost.

    num_matrix_params: parameters of all linear layers of the decoder, each used once per token, without embedding and
    head.  num_head_params: the head's, used once per sampled token.  num_query_features: layers x query heads x head
    size; a query meets a key in 4 floating point operations per feature: 2 for the score, 2 for the mix.
    """

    num_matrix_params: int
    num_head_params: int
    num_query_features: int
    kv_bytes_per_token: int
    bytes_per_param: float = 2.0

    def flops(self, num_tokens: int, num_samples: int, num_pairs: int) -> float:
        """Of a step: tokens computed, samples taken, (query, key) pairs that attention met."""
        linear = self.num_matrix_params * num_tokens + self.num_head_params * num_samples
        return 2.0 * linear + 4.0 * self.num_query_features * num_pairs

    @property
    def weight_bytes(self) -> float:
        """Read once by every step that samples, whatever its number of tokens."""
        return self.bytes_per_param * (self.num_matrix_params + self.num_head_params)


def utilisation(done: float, seconds: float, peak: float) -> float:
    """MFU: what was done over what `peak` per second allows."""
    return done / (seconds * peak) if seconds > 0 and peak > 0 else 0.0


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


class Slo(msgspec.Struct, frozen=True):
    """Upper bounds in seconds, None asks for nothing.  A figure that a request lacks (one token has no TPOT) is met."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in NAMES)

    def __str__(self) -> str:
        bounds = ((name, getattr(self, name)) for name in NAMES)
        return " ".join(f"{name}:{1000 * bound:g}" for name, bound in bounds if bound is not None)

    def met(self, ttft: float | None, tpot: float | None, e2el: float | None) -> bool:
        """Whether a finished request's figures, in seconds, are within every bound."""
        pairs = ((self.ttft, ttft), (self.tpot, tpot), (self.e2el, e2el))
        return all(bound is None or value is None or value <= bound for bound, value in pairs)


def parse_slo(words: Iterable[str]) -> Slo:
    """Of `ttft:200 tpot:50 e2el:5000`, milliseconds.  Raises ValueError naming the word that is wrong."""
    bounds: dict[str, float] = {}
    for word in words:
        name, separator, text = word.partition(":")
        if name not in NAMES or not separator:
            raise ValueError(f"an objective is {', '.join(NAMES)} with milliseconds, as ttft:200; got {word!r}")
        try:
            bounds[name] = float(text) / 1000
        except ValueError:
            raise ValueError(f"{word!r}: {text!r} is no number of milliseconds") from None
        if not bounds[name] > 0:
            raise ValueError(f"{word!r}: the bound must be positive")
    return Slo(**bounds)
