"""Service level objectives: what a request must meet to count."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

NAMES = ("ttft", "tpot", "e2el")


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
            raise ValueError(f"{word!r}: {text!r} is not a number of milliseconds") from None
        if not bounds[name] > 0:
            raise ValueError(f"{word!r}: the bound must be positive")
    return Slo(**bounds)
