"""Names of blocks that were to come and did not: for a while they are computed rather than asked for again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

AVOID_SECONDS = 10.0
MAX_AVOIDED = 8192


class AvoidedNames:
    """The newest of them, each until its time is over."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, names: Iterable[bytes], now: float) -> None:
        for name in names:
            self._until.pop(name, None)
            self._until[name] = now + AVOID_SECONDS
        while len(self._until) > MAX_AVOIDED:
            self._until.popitem(last=False)

    def has(self, name: bytes, now: float) -> bool:
        return self._until.get(name, 0.0) > now
