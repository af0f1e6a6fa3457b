"""Names of blocks, with a time of each: when those were evicted that are gone, until when others are not asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class NameTimes:
    """The latest names, `most` of them."""

    __slots__ = ("_most", "_times")

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: OrderedDict[bytes, float] = OrderedDict()  # the one that was noted first comes first

    def note(self, name: bytes, time: float) -> None:
        times = self._times
        times.pop(name, None)
        times[name] = time
        if len(times) > self._most:
            times.popitem(last=False)

    def note_all(self, names: Iterable[bytes], time: float) -> None:
        for name in names:
            self.note(name, time)

    def get(self, name: bytes) -> float | None:
        """None where the name was not noted, or is forgotten."""
        return self._times.get(name)

    def has_until(self, name: bytes, now: float) -> bool:
        """Whether its time is still to come."""
        return self._times.get(name, 0.0) > now
