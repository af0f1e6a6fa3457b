"""Orders to move blocks: which worker or store the scheduler sends each order to, and how often."""

from __future__ import annotations

import pytest

from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from shared.messages import BlocksMoved, DropBlocks, FetchBlocks, LookUpBlocks, OfferBlocks, StoreContents
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.moving_world import SPACES
from tests.unit.scheduler.worlds.world import World

SIZE = 8
NAMES = [bytes([index]) * 16 for index in range(10)]
PROMPT = [(7 * place) % 50 for place in range(60)]


def world(*has_space: bool, verify_fetches: int = 0) -> World:
    """Workers whose blocks move, or do not."""
    found = World(
        Policy(max_num_batched_tokens=64, verify_fetches=verify_fetches, routing_policy="round_robin"), workers=0
    )
    for index, one in enumerate(has_space):
        found.join(f"w{index}", capacity(block_space=SPACES[SIZE] if one else b""))
    return found


def test_each_worker_whose_blocks_move_offers_them_to_a_store() -> None:
    w = world(False, True, False, True)
    w.scheduler.moves.join("s")
    for index in range(4):
        w.add(f"r{index}", PROMPT, max_tokens=2, salt=f"{index}")
    w.run()
    orders = w.scheduler.moves.take_orders()
    assert [(name, isinstance(order, OfferBlocks) and order.store) for name, order in orders] == [
        ("w1", "s"), ("w3", "s")
    ]  # fmt: skip
    assert not w.scheduler.moves.take_orders(), "each is sent once"


def test_what_was_named_before_a_store_came_is_offered_to_it_too() -> None:
    w = world(True)
    w.add("r", PROMPT[: 3 * SIZE], max_tokens=2)
    w.run()
    moves = w.scheduler.moves
    moves.join("s")
    ((_, offer),) = moves.take_orders()
    assert isinstance(offer, OfferBlocks) and len(offer.names) == 3
    moves.moved(BlocksMoved(1, offer.move_id, 3, 300))
    moves.told(StoreContents("s", [SPACES[SIZE] + name for name in offer.names], []))
    moves.join("s")
    assert not moves.take_orders(), "it only says hello again"
    moves.join("t")
    assert not moves.take_orders(), "a store has them all"
    moves.leave("s")
    assert not moves.take_orders()
    moves.join("u")
    ((_, again),) = moves.take_orders()
    assert isinstance(again, OfferBlocks) and sorted(again.names) == sorted(offer.names), "none has them any more"
    assert (moves.counts.num_stored_blocks, moves.counts.num_stored_bytes, moves.counts.num_failed_moves) == (3, 300, 0)


def name(replica: Replica, *names: bytes) -> None:
    """Have blocks found by these names, which no sequence holds."""
    for block, one in zip(replica.pool.allocate(len(names)), names, strict=True):
        replica.pool.register(block, one, replica.pool.generations[block])
        replica.pool.release([block])


def offers(w: World) -> list[OfferBlocks]:
    return [order for _, order in w.scheduler.moves.take_orders() if isinstance(order, OfferBlocks)]


class Untruth:
    """A worker has fetched two blocks from a store, and computed a third one, which is otherwise there.

    `near` has blocks from another store, which was given some by that worker; `far` has none of these, and the last
    worker has none of any store.
    """

    def __init__(self) -> None:
        self.world = w = world(True, True, True, True, verify_fetches=1)
        self.moves = moves = w.scheduler.moves
        self.first, self.near, self.far, self.idle = w.scheduler.replicas.values()
        for store in ("s", "t", "u"):
            moves.join(store)
        w.add("running", PROMPT[: 3 * SIZE], max_tokens=20)
        w.step()
        w.step()
        assert self.first.running
        name(self.first, NAMES[9])
        given = [order for _ in range(3) for order in offers(w)]
        self.taker = given[0].store
        for order in given:
            moves.moved(BlocksMoved(order.epoch, order.move_id, len(order.blocks)))
        self.false, self.other = sorted({"s", "t", "u"} - {self.taker})
        moves.told(StoreContents(self.false, [SPACES[SIZE] + one for one in NAMES[:3]], []))
        moves.told(StoreContents(self.other, [SPACES[SIZE] + NAMES[6]], []))
        moves.told(StoreContents(self.taker, [SPACES[SIZE] + NAMES[7]], []))
        assert self.first.moves.awaits(NAMES[:3], [], 0)
        ((_, fetch),) = moves.take_orders()
        assert isinstance(fetch, FetchBlocks)
        moves.moved(BlocksMoved(fetch.epoch, fetch.move_id, 2, 200, 0.1))
        for replica in (self.near, self.far, self.idle):
            name(replica, NAMES[5])
        self.near.moves.sources.add(self.taker)
        self.far.moves.sources.add(self.other)
        name(self.first, NAMES[2])
        self.sent = offers(w)

    def compare(self, reason: str) -> None:
        """As the worker answers that has compared the third block."""
        check = next(order for order in (*self.sent, *offers(self.world)) if order.is_check)
        assert (check.store, check.names) == (self.false, NAMES[2:3])
        self.moves.moved(BlocksMoved(check.epoch, check.move_id, int(not reason), reason=reason))


def test_what_rests_on_a_store_s_untruth_is_found_no_more_and_computed_again() -> None:
    scene = Untruth()
    moves, w = scene.moves, scene.world
    counts = moves.counts
    assert (counts.num_fetched_blocks, counts.num_fetched_bytes) == (2, 200)
    assert (counts.num_asked_tokens, counts.num_fetched_tokens) == (2 * SIZE, 2 * SIZE)
    scene.compare("different")
    assert (moves.num_checks, moves.num_false_blocks) == (1, 1)
    (alarm,) = w.scheduler.journal.take_alarms()
    assert (alarm.event, alarm.fields["store"], alarm.fields["worker"]) == ("store_untrue", scene.false, "w0")
    assert not list(scene.first.pool.names) and not list(scene.near.pool.names)
    assert list(scene.far.pool.names) and list(scene.idle.pool.names), "nothing came to these from there"
    assert not scene.first.running and len(scene.first.waiting) == 1
    assert not scene.first.moves.sources and not scene.first.moves.takers
    dropped = [order.store for _, order in moves.take_orders() if isinstance(order, DropBlocks)]
    assert sorted(dropped) == sorted({scene.false, scene.taker})
    assert not [order for _, order in moves.take_orders() if isinstance(order, DropBlocks)], "each is told once"
    assert [moves.stores.num_of(store) for store in (scene.false, scene.taker, scene.other)] == [0, 0, 1]
    w.run()
    w.assert_outputs("running")


def test_a_block_that_is_the_same_in_the_store_changes_nothing() -> None:
    for reason in ("", "missing"):
        scene = Untruth()
        names = set(scene.first.pool.names)
        scene.compare(reason)
        assert (scene.moves.num_checks, scene.moves.num_false_blocks) == (1, 0)
        assert set(scene.first.pool.names) == names and scene.first.running
        assert scene.moves.stores.num_of(scene.false) == 3 and not scene.world.scheduler.journal.take_alarms()


def test_what_is_on_its_way_when_an_untruth_is_found_is_given_up_or_forgotten_when_it_has_come() -> None:
    scene = Untruth()
    offer = next(order for order in scene.sent if order.epoch == scene.near.epoch)
    assert scene.near.moves.awaits(NAMES[7:8], [], 0) and scene.near.moves.held
    scene.compare("different")
    assert not scene.near.moves.held, "nothing more of it may come"
    scene.moves.take_orders()
    scene.moves.moved(BlocksMoved(offer.epoch, offer.move_id, len(offer.blocks)))
    assert scene.moves.take_orders() == [(offer.store, DropBlocks(offer.store))], "it was given away before"


def test_what_no_store_has_told_of_is_looked_for_in_a_backend() -> None:
    w = world(True)
    moves = w.scheduler.moves
    moves.join("s", can_look_up=True)
    names = [bytes([index]) * 16 for index in range(6)]
    assert w.scheduler.replicas["w0"].moves.awaits(names, [], 0)
    ((where, order),) = moves.take_orders()
    assert where == "s" and isinstance(order, LookUpBlocks) and moves.wake_time == moves.stores.lookups.deadline
    assert not moves.take_orders()
    moves.told(StoreContents("s", order.keys[:2], order.keys[2:]))
    assert moves.wake_time is None and moves.stores.num_of("s") == 2


def test_a_look_up_is_over_in_time_where_no_worker_is_left() -> None:
    w = world(True)
    moves = w.scheduler.moves
    moves.join("s", can_look_up=True)
    assert w.scheduler.replicas["w0"].moves.awaits([bytes([index]) * 16 for index in range(6)], [], 0)
    assert moves.take_orders() and moves.wake_time is not None
    w.lose("w0")
    moves.take_orders(w.scheduler.clock.now + 1.0)
    assert moves.wake_time is None


@pytest.mark.parametrize("victim", ["w0", "w1"])
def test_a_fetch_between_workers_is_over_when_one_of_them_is_gone(victim: str) -> None:
    w = world(True, True)
    lender, borrower = w.scheduler.replicas.values()
    for instance in w.workers:
        w.scheduler.moves.serve(instance)
    name(lender, *NAMES[:3])
    assert borrower.moves.awaits(NAMES[:3], [], 0)
    assert (lender.pool.num_held, borrower.pool.num_held) == (3, 3)
    w.lose(victim)
    other = borrower if victim == "w0" else lender
    assert not other.moves.open and not other.pool.num_held
    assert w.scheduler.moves.wake_time is None and not w.scheduler.moves.take_orders()
