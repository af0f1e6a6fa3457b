"""The workers that give their blocks to others: which of them has most of a prefix, and how soon it would be elsewhere.

What a worker has the scheduler knows itself, from that worker's pool; nothing has to be told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.computing_speed import ComputingSpeed

WEIGHT = 0.3  # of the newest delay
HALF_LIFE = 30.0  # seconds after which a delay that was measured is taken for half: a slow worker is tried again


class Lender(Protocol):
    """`ReplicaMoves` of a worker, as another one's sees it."""

    space: bytes

    @property
    def pool(self) -> BlockPool: ...

    @property
    def speed(self) -> ComputingSpeed: ...

    def lend(self, names: Sequence[bytes], deadline: float, ready: Callable[[int], None]) -> int: ...

    def take_back(self, move_id: int) -> None: ...


class Peer(Protocol):
    """`Replica`."""

    @property
    def lender(self) -> Lender: ...


class Peers:
    """By name, those that serve their blocks.  Another life of a worker goes on serving."""

    def __init__(self, replicas: Mapping[str, Peer] | None = None) -> None:
        self.serving: set[str] = set()
        self._replicas = {} if replicas is None else replicas
        self._delays: dict[str, tuple[float, float]] = {}  # seconds beside those of the bytes, and when measured

    def __bool__(self) -> bool:
        return bool(self.serving)

    def leave(self, instance: str) -> None:
        self.serving.discard(instance)
        self._delays.pop(instance, None)

    def get(self, instance: str) -> Lender | None:
        replica = self._replicas.get(instance)
        return replica.lender if replica is not None and instance in self.serving else None

    def longest(self, borrower: Lender, names: Sequence[bytes]) -> tuple[str, int]:
        """The worker that has the most of the first names, and how many; it may be none."""
        best, most = "", 0
        for instance in self.serving:
            lender = self.get(instance)
            if lender is None or lender is borrower or lender.space != borrower.space:
                continue
            count = lender.pool.num_cached_of(names)
            if count > most or (count == most > 0 and instance < best):
                best, most = instance, count
        return best, most

    def delay(self, instance: str, now: float) -> float:
        """Seconds that a fetch is likely to take beside its bytes, for steps and messages; 0 where that was never
        measured."""
        seconds, when = self._delays.get(instance, (0.0, now))
        return seconds / math.exp2(min(60.0, max(0.0, now - when) / HALF_LIFE))

    def delayed(self, instance: str, seconds: float, now: float) -> None:
        """A fetch from it has taken so long beside its bytes."""
        known = self.delay(instance, now) if instance in self._delays else seconds
        self._delays[instance] = max(0.0, known + WEIGHT * (seconds - known)), now
