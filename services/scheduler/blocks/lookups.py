"""Names that no store has told of, and that a store is asked to look for: it may find them in its backend, where
another store has put them, also one of another deployment.

A sequence waits for the answer, but never long: what is not known in time is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.scheduler.blocks.name_times import NameTimes
from shared.messages import LookUpBlocks

LEAST_NAMES, MOST_NAMES = 4, 128  # that are looked for at a time
ANSWER_SECONDS = 0.1  # that a sequence waits at most
SHARE = 0.04  # of the time of computing, which it may wait
LEAST_SECONDS = 0.01  # in which an answer is likely; where it may wait less, nothing is looked for
REST_SECONDS = 10.0  # that a store is asked nothing after it did not answer in time
AGAIN_SECONDS = 30.0  # after which the same name is looked for again
MAX_SETTLED = 1 << 16  # names


class BlockLookups:
    """By key, which is a space and a name, as `StoreIndex` has them.

    Invariant: a key that is open has a deadline, and is settled by an answer or by `expire`.
    """

    def __init__(self) -> None:
        self._stores: dict[str, float] = {}  # that can look further than they tell, and until when each has a rest
        self._open: dict[bytes, tuple[str, float]] = {}  # the store that was asked, and until when it is waited for
        self._settled = NameTimes(MAX_SETTLED)  # until when each is not asked for again
        self._unsent: list[LookUpBlocks] = []

    def join(self, store: str) -> None:
        """It can look further."""
        self._stores.setdefault(store, 0.0)

    def leave(self, store: str) -> None:
        self._stores.pop(store, None)
        self._unsent = [order for order in self._unsent if order.store != store]
        for key in [key for key, (asked, _) in self._open.items() if asked == store]:
            del self._open[key]

    def awaits(self, space: bytes, names: Sequence[bytes], computing: float, now: float) -> bool:
        """Whether the first of these names may soon be known to be at a store.  Where that is worth while, it is looked
        for from now on, and those behind it too.  `computing`: seconds that computing them takes; 0: not known."""
        if not self._stores:
            return False
        if (found := self._open.get(space + names[0])) is not None:
            return found[1] > now
        if len(names) < LEAST_NAMES or self._settled.has_until(space + names[0], now):
            return False
        wait = min(ANSWER_SECONDS, SHARE * computing or ANSWER_SECONDS)
        store = next((store for store, rests_until in self._stores.items() if rests_until <= now), None)
        if store is None or wait < LEAST_SECONDS:
            return False
        keys = [key for name in names[:MOST_NAMES] if (key := space + name) not in self._open]
        self._open.update(dict.fromkeys(keys, (store, now + wait)))
        self._unsent.append(LookUpBlocks(store, keys))
        return True

    def told(self, keys: Iterable[bytes], now: float) -> None:
        """A store has said of these whether it has them."""
        for key in keys:
            if self._open.pop(key, None) is not None:
                self._settled.note(key, now + AGAIN_SECONDS)

    def expire(self, now: float) -> None:
        """Wait no longer for what was not answered in time."""
        if not self._open:
            return
        late = [(key, store) for key, (store, deadline) in self._open.items() if deadline <= now]
        for key, store in late:
            del self._open[key]
            self._settled.note(key, now + AGAIN_SECONDS)
            if store in self._stores:
                self._stores[store] = now + REST_SECONDS

    @property
    def are_open(self) -> bool:
        """Whether an answer is waited for."""
        return bool(self._open)

    def take_orders(self) -> list[LookUpBlocks]:
        """Those that were made since the last call."""
        orders, self._unsent = self._unsent, []
        return orders

    @property
    def deadline(self) -> float | None:
        """When the next one is over, answered or not."""
        return min((deadline for _, deadline in self._open.values()), default=None)
