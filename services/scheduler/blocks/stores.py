"""What the stores of a deployment hold, as they tell it, and how fast blocks come from them.

Nothing depends on its being right: a block that is not there any more is a miss when it is fetched, and one that is
there unknown is offered once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from services.scheduler.blocks.lookups import BlockLookups
from shared.transport.sharding import pick

MAX_KEYS = 1 << 22  # of one store
KEY_BYTES = 32  # a space and a name
HALF_LIFE = 30.0  # seconds after which a speed that was measured is taken for doubled: a slow store is tried again


class StoreIndex:
    """Keys by store.  A key is the space of a block, which says what its bytes depend on, and its name."""

    def __init__(self, verify_fetches: int = 0) -> None:
        """`verify_fetches`: of so many fetches one is to be verified; 0: none."""
        self.lookups = BlockLookups()
        self._verify_fetches = verify_fetches
        self._num_fetches = 0
        self._distrusted: set[str] = set()  # stores that have told untruths
        self._keys: dict[str, set[bytes]] = {}
        self._speeds: dict[str, tuple[float, float]] = {}  # bytes per second, and when that was measured

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __contains__(self, store: str) -> bool:
        return store in self._keys

    def join(self, store: str) -> None:
        self._keys.setdefault(store, set())

    def leave(self, store: str) -> None:
        self.lookups.leave(store)
        self._keys.pop(store, None)
        self._speeds.pop(store, None)
        self._distrusted.discard(store)

    def told(self, store: str, kept: Iterable[bytes], dropped: Iterable[bytes], *, is_first: bool) -> None:
        """A store's account of what has changed; of one that has left it is ignored."""
        keys = self._keys.get(store)
        if keys is None or store in self._distrusted:
            return
        if is_first:
            keys.clear()
        keys.update(key for key in kept if len(key) == KEY_BYTES)
        keys.difference_update(dropped)
        if len(keys) > MAX_KEYS:
            keys.clear()

    def discard(self, store: str, space: bytes, names: Iterable[bytes]) -> None:
        """It does not have these, whatever it said."""
        if keys := self._keys.get(store):
            keys.difference_update(space + name for name in names)

    def empty(self, store: str) -> None:
        """It has nothing, until it tells of more."""
        if keys := self._keys.get(store):
            keys.clear()

    def distrust(self, store: str) -> None:
        """Whatever it says, it has nothing any more, and is given nothing."""
        self.empty(store)
        self.lookups.leave(store)
        self._distrusted.add(store)

    def is_to_verify(self) -> bool:
        """Whether the fetch that begins now is one of those; the first is."""
        self._num_fetches += 1
        return self._verify_fetches > 0 and self._num_fetches % self._verify_fetches == 1 % self._verify_fetches

    def num_of(self, store: str) -> int:
        return len(self._keys.get(store, ()))

    def holds(self, space: bytes, name: bytes) -> bool:
        """Whether any store has it."""
        key = space + name
        return any(key in keys for keys in self._keys.values())

    def longest(self, space: bytes, names: Sequence[bytes]) -> tuple[str, int]:
        """The store that has the most of the first names without a gap, and how many; it may be none."""
        best, most = "", 0
        for store, keys in self._keys.items():
            count = next((place for place, name in enumerate(names) if space + name not in keys), len(names))
            if count > most:
                best, most = store, count
        return best, most

    def place_for(self, worker: str) -> str:
        """The store that a worker gives its blocks to, as long as the stores are the same: so a prefix lies in one.
        Empty where there is none."""
        return pick(worker, [store for store in self._keys if store not in self._distrusted]) or ""

    # -- how fast

    def measured(self, store: str, num_bytes: int, seconds: float, now: float) -> None:
        """So many bytes came from it in so long a time."""
        speed = max(1, num_bytes) / max(seconds, 1e-6)
        known, _ = self._speeds.get(store, (speed, now))
        self._speeds[store] = (known + speed) / 2, now

    def failed(self, store: str, seconds: float, now: float) -> None:
        """Nothing came from it in so long a time."""
        known, _ = self._speeds.get(store, (1 / max(seconds, 1e-6), now))
        self._speeds[store] = min(known / 4, 1 / max(seconds, 1e-6)), now

    def seconds_for(self, store: str, num_bytes: int, now: float) -> float:
        """That so many bytes are likely to take; 0 where that was never measured."""
        if store not in self._speeds:
            return 0.0
        speed, when = self._speeds[store]
        return num_bytes / (speed * math.exp2(min(60.0, max(0.0, now - when) / HALF_LIFE)))
