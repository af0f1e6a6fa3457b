"""When a fetch is worth while, when it is over, and what is not asked for again."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from services.scheduler.blocks.block_pool import BlockPool
from services.scheduler.blocks.clock import Clock
from services.scheduler.blocks.stores import StoreIndex
from services.scheduler.state import moves
from services.scheduler.state.moves import REST_SECONDS, SLOW, ReplicaMoves
from services.scheduler.state.peers import Peer, Peers
from services.scheduler.state.policy import Policy
from shared.errors import ProtocolError
from shared.messages import BlocksMoved, FetchBlocks, ServeBlocks
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.moving_world import SPACES, MovingWorld

SPACE = b"s" * 16
NAMES = [bytes([index]) * 16 for index in range(8)]


class Place:
    """A worker with a store that has the first six blocks of a prefix, and another worker that has seven or none."""

    def __init__(
        self, num_blocks: int = 20, verify_fetches: int = 0, max_head_drafts: int = 0, has_peer: bool = False
    ) -> None:
        self.clock, self.stores, self.pool = Clock(), StoreIndex(verify_fetches), BlockPool(num_blocks)
        self.stores.join("s")
        self.stores.told("s", [SPACE + name for name in NAMES[:6]], [], is_first=True)
        size = capacity(num_blocks, block_space=SPACE)
        size = msgspec.structs.replace(size, max_head_drafts=max_head_drafts)
        self.peer = ReplicaMoves(
            BlockPool(num_blocks), 6, capacity(num_blocks, block_space=SPACE), self.stores, Clock(), Peers()
        )
        for name in NAMES[:7] if has_peer else ():
            (block,) = self.peer.pool.allocate(1)
            self.peer.pool.register(block, name, self.peer.pool.generations[block])
            self.peer.pool.release([block])
        self.peers = Peers({"p": cast(Peer, SimpleNamespace(lender=self.peer))})
        self.peers.serving.add("p")
        self.moves = ReplicaMoves(self.pool, 5, size, self.stores, self.clock, self.peers)

    def finish(self, num_done: int, seconds: float = 0.1, reason: str = "") -> None:
        (order,) = self.moves.take_fetches(0)
        num_bytes = num_done * (1 << 20)
        self.moves.moved(BlocksMoved(5, order.move_id, num_done, num_bytes, seconds, reason))


def test_what_came_is_found_and_what_did_not_is_computed() -> None:
    place = Place()
    assert place.moves.awaits(NAMES, [], 1)
    assert place.moves.awaits(NAMES[:3], [], 1), "a sibling waits for the same fetch"
    assert place.pool.num_held == 6
    place.finish(4, reason="missing")
    found = place.pool.lookup(NAMES)
    assert len(found) == 4 and not place.pool.num_held
    assert not place.moves.awaits(NAMES, found, 1), "the rest is not there, whatever the store said"
    assert [place.stores.holds(SPACE, name) for name in NAMES[:6]] == [True] * 4 + [False] * 2


def test_what_a_store_did_not_bring_is_not_asked_for_again_for_a_time() -> None:
    """It may have it, and be too slow: `slow` is no reason to think that it has lost it."""
    place = Place()
    assert place.moves.awaits(NAMES, [], 1)
    place.finish(4, reason=SLOW)
    found = place.pool.lookup(NAMES)
    assert all(place.stores.holds(SPACE, name) for name in NAMES[:6])
    assert not place.moves.awaits(NAMES, found, 1)
    place.clock.now += moves.AVOID_SECONDS + 1
    assert place.moves.awaits(NAMES, found, 1)


def test_a_slow_store_is_passed_over_and_tried_again_later() -> None:
    place = Place()
    place.moves.speed.computed(256, 1.0)
    assert place.moves.awaits(NAMES, [], 1), "its speed is not known"
    place.finish(1, seconds=4.0)
    place.clock.now = 60.0
    assert not place.moves.awaits(NAMES[1:], [], 1), "five blocks take longer than their 40 tokens"
    place.clock.now = 1000.0
    assert place.moves.awaits(NAMES[1:], [], 1)


def test_a_fetch_without_an_answer_is_over_in_time_and_no_later_answer_counts() -> None:
    place = Place()
    assert place.moves.awaits(NAMES, [], 1)
    (order,) = place.moves.take_fetches(0)
    deadline = place.moves.deadline
    assert deadline is not None and 0 < deadline < 5
    place.clock.now = deadline
    assert place.moves.expire() == 1 and not place.pool.num_held
    assert place.moves.moved(BlocksMoved(5, order.move_id, 6)) is None
    assert not place.pool.lookup(NAMES)
    assert not place.moves.awaits(NAMES, [], 1), "it is computed now"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_store_that_takes_longer_than_computing_or_says_nothing_is_slow(is_late: bool) -> None:
    place = Place()
    place.clock.now = 70.0
    assert place.moves.awaits(NAMES, [], 1)
    deadline = place.moves.deadline
    assert deadline is not None
    place.clock.now = deadline
    if is_late:
        assert place.moves.expire() == 1
    else:
        place.finish(0, reason=SLOW)
    seconds = deadline - 70.0
    assert seconds <= place.stores.seconds_for("s", 1, place.clock.now) <= 8 * seconds, "not a byte came in that time"
    assert not place.pool.num_held


def test_what_another_worker_has_is_lent_and_its_delay_is_known_from_then_on() -> None:
    place = Place(has_peer=True)
    place.clock.now = 70.0
    assert place.moves.awaits(NAMES, [], 1), "it has more than the store"
    assert not place.moves.take_fetches(0), "before its blocks can be read"
    (loan,) = place.peer.take_fetches(3)
    assert isinstance(loan, ServeBlocks) and (loan.names, loan.next_step_id) == (NAMES[:7], 3)
    lent = [(place.peer.has_lent, place.peer.pool.num_held)]
    place.peer.moved(BlocksMoved(6, loan.move_id, 7))
    (fetch,) = place.moves.take_fetches(4)
    assert isinstance(fetch, FetchBlocks) and (fetch.store, fetch.names, fetch.next_step_id) == ("p", NAMES[:7], 4)
    place.clock.now = 70.75
    place.moves.moved(BlocksMoved(5, fetch.move_id, 7, 7 << 20, 0.25))
    assert place.pool.lookup(NAMES) and not place.pool.num_held
    lent.append((place.peer.has_lent, place.peer.pool.num_held))
    assert lent == [(True, 7), (False, 0)], "and given back"
    assert place.peers.delay("p", 70.75) == 0.5, "beside the bytes, which took a quarter of a second"
    assert place.moves.seconds_from("p", 7) == pytest.approx(0.75)


@pytest.mark.parametrize("count", [0, None])
def test_a_loan_that_fails_or_is_not_answered_is_over_on_both_sides(count: int | None) -> None:
    place = Place(has_peer=True)
    assert place.moves.awaits(NAMES, [], 1)
    (loan,) = place.peer.take_fetches(0)
    if count is None:
        assert place.moves.deadline == place.peer.deadline
        place.clock.now = place.moves.deadline or 0.0
        assert place.moves.expire() == 1
    else:
        place.peer.moved(BlocksMoved(6, loan.move_id, count))
    assert not place.moves.open and not place.peer.open and not place.pool.num_held and not place.peer.pool.num_held
    assert not place.moves.take_fetches(0)
    assert not place.moves.awaits(NAMES, [], 1), "it is computed now"


def test_a_fetch_leaves_room_and_gives_way() -> None:
    place = Place(num_blocks=8)
    assert place.moves.awaits(NAMES, [], 5) and place.pool.num_available == 5
    assert place.moves.give_way() and place.pool.num_available == 8
    assert not place.moves.give_way()
    assert not place.moves.take_fetches(0), "its order is not sent"


def test_an_answer_that_makes_no_sense_is_refused_and_changes_nothing() -> None:
    place = Place()
    place.moves.awaits(NAMES, [], 1)
    (order,) = place.moves.take_fetches(0)
    with pytest.raises(ProtocolError):
        place.moves.moved(BlocksMoved(5, order.move_id, 7))
    assert place.pool.num_held == 6


def test_only_what_no_store_has_is_offered_one_offer_at_a_time() -> None:
    place = Place()
    for name, block in zip(NAMES, place.pool.allocate(8), strict=True):
        place.pool.register(block, name, 1)
    place.pool.release(list(range(6, 8)))
    first = place.moves.next_offer(3)
    assert first is not None and (first.names, first.next_step_id) == (NAMES[6:], 3)
    place.pool.name_again()
    assert place.moves.next_offer(3) is None
    place.moves.moved(BlocksMoved(5, first.move_id, 1, reason="unreachable"))
    assert place.moves.next_offer(3) is None, "the store has a rest"
    place.clock.now = REST_SECONDS
    assert place.moves.next_offer(3) is not None


def test_a_store_that_does_not_answer_an_offer_has_a_rest() -> None:
    place = Place()
    place.clock.now = 70.0
    for name, block in zip(NAMES, place.pool.allocate(8), strict=True):
        place.pool.register(block, name, 1)
    place.pool.release(list(range(6, 8)))
    assert place.moves.next_offer(3) is not None
    place.pool.name_again()
    place.clock.now = late = place.moves.deadline or 0.0
    assert place.moves.expire() == 1
    assert place.moves.next_offer(4) is None
    place.clock.now = late + REST_SECONDS
    assert place.moves.next_offer(4) is not None


def test_what_waits_for_a_row_has_its_prefix_fetched_meanwhile() -> None:
    world = MovingWorld(Policy(verify_fetches=0), num_blocks=64, block_size=8, max_num_seqs=1, block_space=SPACES[8])
    world.join_store("s", 100)
    prompt = [index % 23 for index in range(65)]
    world.add("first", prompt, max_tokens=1)
    while world.step():
        pass
    world.tell("s", random.Random(3))
    world.lose("w0")
    world.join("w1", capacity(64, 8, 1, 256, block_space=SPACES[8]))
    world.add("long", [1, 2, 3], max_tokens=50)
    world.plan("w1")  # it takes the row
    world.add("waits", [*prompt, 7], max_tokens=1)
    replica = world.scheduler.replicas["w1"]
    for _ in range(20):
        world.step()
    assert replica.running[0].request.request_id == "long"
    (waiting,) = replica.waiting
    assert replica.pool.knows(waiting.hash_blocks(8)[7]), "eight blocks, while it has no row"


def test_blocks_with_a_draft_head_s_keys_are_not_verified() -> None:
    """The head's key of a block's last token is computed with the token behind it, which the name does not say."""
    place = Place(verify_fetches=1, max_head_drafts=4)
    assert place.moves.awaits(NAMES, [], 1)
    assert place.pool.num_held == 6


def test_a_fetch_to_be_verified_leaves_its_last_block_to_be_computed_and_compared() -> None:
    place = Place(verify_fetches=2)
    assert place.moves.awaits(NAMES, [], 1)
    assert place.pool.num_held == 5
    place.finish(5)
    found = place.pool.lookup(NAMES)
    assert not place.moves.awaits(NAMES, found, 1), "it is not fetched after all"
    (block,) = place.pool.allocate(1)
    place.pool.register(block, NAMES[5], place.pool.generations[block])
    offers = [place.moves.next_offer(3) for _ in range(2)]
    check = next(one for one in offers if one is not None)
    assert (check.names, check.is_check, check.store) == ([NAMES[5]], True, "s")
    place.moves.moved(BlocksMoved(5, check.move_id, 0, reason="different"))
    assert place.moves.sources == {"s"} and not place.moves.takers


def test_of_blocks_without_end_that_are_to_be_compared_the_newest_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moves, "MAX_CHECKED", 1)
    place = Place(verify_fetches=1)
    for first in (0, 3):
        assert place.moves.awaits(NAMES[first : first + 3], [], 1)
        place.finish(2)
    for name, block in zip((NAMES[2], NAMES[5]), place.pool.allocate(2), strict=True):
        place.pool.register(block, name, place.pool.generations[block])
    offer = place.moves.next_offer(3)
    assert offer is not None and (offer.names, offer.is_check) == ([NAMES[5]], True)


@pytest.mark.parametrize("rate", [0.0, 100.0])
def test_a_fetch_has_as_long_as_computing_takes_or_some_time_where_that_is_not_known(rate: float) -> None:
    place = Place()
    place.moves.speed.tokens_per_second = rate
    assert place.moves.awaits(NAMES, [], 1)
    (move,) = place.moves.open.values()
    computing = 6 * place.moves._capacity.block_size / rate if rate else 0.0
    expected = computing if rate else moves.FETCH_SECONDS
    assert move.deadline - place.clock.now == pytest.approx(expected)
    assert moves.LEAST_FETCH_SECONDS < expected < moves.MOST_FETCH_SECONDS
