"""Blocks that a prefix cache had once: their names, and when they went.  Bounded: the oldest are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from services.scheduler.blocks.clock import Clock

MAX_GHOSTS = 1 << 16


class EvictionHistory:
    """The latest `size` names, at most MAX_GHOSTS."""

    __slots__ = ("_clock", "_size", "_times")

    def __init__(self, size: int, clock: Clock) -> None:
        self._size = min(size, MAX_GHOSTS)
        self._clock = clock
        self._times: OrderedDict[bytes, float] = OrderedDict()  # oldest first

    def add(self, name: bytes) -> None:
        """It goes now."""
        times = self._times
        times.pop(name, None)
        times[name] = self._clock.now
        if len(times) > self._size:
            times.popitem(last=False)

    def add_all(self, names: Iterable[bytes]) -> None:
        for name in names:
            self.add(name)

    def get(self, name: bytes) -> float | None:
        """When it went, None where that is not known."""
        return self._times.get(name)
