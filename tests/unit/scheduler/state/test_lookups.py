"""What a store is asked to look for in its backend, and how long a sequence waits for the answer."""

from __future__ import annotations

import pytest

from services.scheduler.blocks import lookups
from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.clock import Clock
from services.scheduler.blocks.lookups import AGAIN_SECONDS, ANSWER_SECONDS, MOST_NAMES, REST_SECONDS, SHARE
from services.scheduler.blocks.stores import StoreIndex
from services.scheduler.state.moves import ReplicaMoves
from services.scheduler.state.peers import Peers
from shared.messages import StoreContents
from tests.unit.scheduler.worlds.fake_worker import capacity

SPACE = b"s" * 16
NAMES = [index.to_bytes(16, "big") for index in range(200)]
KEYS = [SPACE + name for name in NAMES]


class Place:
    """A worker, and a store that has a backend."""

    def __init__(self) -> None:
        self.clock, self.stores = Clock(), StoreIndex()
        self.stores.join("s")
        self.lookups = self.stores.lookups
        self.lookups.join("s")
        self.moves = ReplicaMoves(BlockPool(20), 5, capacity(20, block_space=SPACE), self.stores, self.clock, Peers())

    def awaits(self, names: list[bytes]) -> bool:
        return self.moves.awaits(names, [], 1)

    def deadline(self) -> float | None:
        return self.lookups.deadline

    def tell(self, kept: list[bytes], dropped: list[bytes]) -> None:
        """As `BlockMoves.told` does."""
        message = StoreContents("s", kept, dropped)
        self.stores.told(message.instance, kept, dropped, is_first=False)
        self.lookups.told([*kept, *dropped], self.clock.now)


def test_what_is_found_is_fetched_and_the_rest_is_computed() -> None:
    place = Place()
    assert place.awaits(NAMES[:8]) and place.awaits(NAMES[:6]), "a sibling waits for the same answer"
    (order,) = place.lookups.take_orders()
    assert (order.store, order.keys) == ("s", KEYS[:8])
    place.tell(KEYS[:5], KEYS[5:8])
    assert place.lookups.deadline is None
    assert place.awaits(NAMES[:8])
    (fetch,) = place.moves.take_fetches(0)
    assert fetch.names == NAMES[:5]
    assert not place.awaits(NAMES[5:8]) and not place.lookups.take_orders(), "it was looked for just now"
    place.clock.now = AGAIN_SECONDS + 1
    assert not place.awaits(NAMES[5:8]), "few blocks are computed sooner"
    assert place.awaits(NAMES[5:9])


def test_an_answer_that_does_not_come_is_not_waited_for_and_the_store_has_a_rest() -> None:
    place = Place()
    assert place.awaits(NAMES[:8])
    assert place.deadline() == ANSWER_SECONDS
    place.clock.now = ANSWER_SECONDS
    assert not place.awaits(NAMES[:8]), "it is computed now"
    place.lookups.expire(place.clock.now)
    assert place.deadline() is None
    assert not place.awaits(NAMES[20:28])
    place.clock.now += REST_SECONDS + 0.1
    assert place.awaits(NAMES[20:28])
    place.tell(KEYS[:8], [])  # late, and as good as in time
    assert place.awaits(NAMES[:8]) and place.moves.take_fetches(0)


def test_waiting_takes_a_small_share_of_computing() -> None:
    place = Place()
    place.moves.speed.computed(1000, 1.0)  # a block has 8 tokens: eight blocks take 0.064 s
    assert not place.awaits(NAMES[:8]), "an answer would hardly come in time"
    assert place.awaits(NAMES)
    size = place.moves._capacity.block_size
    assert place.lookups.deadline == SHARE * len(NAMES) * size / 1000
    (order,) = place.lookups.take_orders()
    assert len(order.keys) == MOST_NAMES


def test_a_store_that_is_gone_or_not_trusted_is_not_asked() -> None:
    for end in (StoreIndex.leave, StoreIndex.distrust):
        place = Place()
        assert place.awaits(NAMES[:8])
        end(place.stores, "s")
        assert not place.lookups.take_orders() and place.lookups.deadline is None
        assert not place.awaits(NAMES[:8])


def test_of_names_without_end_those_that_were_looked_for_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MAX_SETTLED", 12)
    place = Place()

    def look_for(first: int) -> bool:
        is_new = place.lookups.awaits(SPACE, NAMES[first : first + 4], 0.0, place.clock.now)
        place.tell([], KEYS[first : first + 4])
        place.clock.now += 1.0
        return is_new

    assert [look_for(first) for first in (0, 4, 8)] == [True] * 3
    place.clock.now += AGAIN_SECONDS
    assert look_for(0), "its time is over"
    assert look_for(12) and not look_for(0), "and it is the one before the last now"
    assert look_for(8)


def test_a_store_without_a_backend_is_not_asked() -> None:
    place = Place()
    place.stores.leave("s")
    place.stores.join("t")
    assert not place.awaits(NAMES[:8]) and not place.lookups.take_orders()
