"""Which worker has most of a prefix, and how soon its blocks would be elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.state.peers import HALF_LIFE, WEIGHT, Lender, Peer, Peers

SPACE = b"s" * 16
NAMES = [bytes([index]) * 16 for index in range(8)]


def lender(num_cached: int, space: bytes = SPACE) -> Lender:
    pool = BlockPool(20)
    for name in NAMES[:num_cached]:
        (block,) = pool.allocate(1)
        pool.register(block, name, pool.generations[block])
    return cast(Lender, SimpleNamespace(space=space, pool=pool))


def peers_of(**lenders: Lender) -> Peers:
    peers = Peers({name: cast(Peer, SimpleNamespace(lender=one)) for name, one in lenders.items()})
    peers.serving.update(lenders)
    return peers


def test_the_one_with_the_most_is_asked_but_not_the_borrower_itself() -> None:
    mine = lender(8)
    peers = peers_of(a=lender(2), b=lender(3), c=lender(5, space=b"o" * 16), me=mine)
    assert peers.longest(mine, NAMES) == ("b", 3)
    peers.leave("b")
    assert peers.longest(mine, NAMES) == ("a", 2)
    assert peers.longest(mine, [b"unknown"]) == ("", 0)
    peers.serving.add("gone")  # it has said that it serves, and is no worker yet
    assert peers.longest(mine, NAMES) == ("a", 2) and peers.get("gone") is None


def test_of_equals_the_choice_does_not_depend_on_chance() -> None:
    """A recording is replayed in another process, where a set has another order."""
    for num_cached in (1, 4):
        names = [f"w{index:02}" for index in range(30)]
        peers = peers_of(**{name: lender(num_cached) for name in names})
        assert peers.longest(lender(0), NAMES) == ("w00", num_cached)


def test_delays_are_smoothed_and_fade_and_are_forgotten_with_the_worker() -> None:
    peers = peers_of(a=lender(2))
    assert peers.delay("a", 7.0) == 0.0
    peers.delayed("a", 2.0, 7.0)
    assert peers.delay("a", 7.0) == 2.0 and peers.delay("a", 7.0 + HALF_LIFE) == 1.0
    peers.delayed("a", 4.0, 7.0)
    assert peers.delay("a", 7.0) == pytest.approx(2.0 + WEIGHT * 2.0)
    peers.delayed("a", -90.0, 7.0)
    assert peers.delay("a", 7.0) == 0.0, "no fetch takes less than no time"
    peers.delayed("a", 5.0, 7.0)
    peers.leave("a")
    assert peers.delay("a", 7.0) == 0.0 and not peers
