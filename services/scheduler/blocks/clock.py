"""The time that the caller passes to the core, which has no clock of its own."""

from __future__ import annotations


class Clock:
    """The time of the event that is being handled, in Unix seconds where a request's time is accounted for."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
