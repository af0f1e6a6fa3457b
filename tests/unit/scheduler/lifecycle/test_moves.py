"""Orders to move blocks: who is sent what, and how often."""

from __future__ import annotations

from services.scheduler.state.policy import Policy
from shared.messages import BlocksMoved, DropBlocks, LookUpBlocks, OfferBlocks, StoreContents
from tests.unit.scheduler.fake_worker import capacity
from tests.unit.scheduler.moving_world import SPACES
from tests.unit.scheduler.world import World

SIZE = 8
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
    assert [(name, type(order), order.store) for name, order in orders] == [
        ("w1", OfferBlocks, "s"), ("w3", OfferBlocks, "s")
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
    assert (moves.counts.num_stored_blocks, moves.counts.num_stored_bytes, moves.counts.num_failed_moves) == (3, 300, 0)


def test_a_store_that_has_told_an_untruth_is_asked_no_more_and_others_forget_once() -> None:
    w = world(True, verify_fetches=1)
    moves, replica = w.scheduler.moves, w.scheduler.replicas["w0"]
    for store in ("s", "t"):
        moves.join(store, can_look_up=True)
    w.add("before", PROMPT[: 3 * SIZE], max_tokens=1)
    w.run()
    orders = [order for _, order in moves.take_orders() if isinstance(order, OfferBlocks)]
    (offer,) = orders
    other = next(name for name in ("s", "t") if name != offer.store)
    assert replica.moves.takers == {offer.store}
    names = [bytes([index]) * 16 for index in range(3)]
    moves.told(StoreContents(other, [SPACES[SIZE] + name for name in names], []))
    moves.told(StoreContents(offer.store, [SPACES[SIZE] + offer.names[0]], []))
    assert replica.moves.awaits(names, [], 0)
    ((_, fetch),) = moves.take_orders()
    moves.moved(BlocksMoved(1, fetch.move_id, 2, 200, 0.1))  # type: ignore[union-attr]
    moves.moved(BlocksMoved(1, offer.move_id, 3))
    (block,) = replica.pool.allocate(1)
    replica.pool.register(block, names[2], replica.pool.generations[block])
    checks = [order for _ in range(3) for _, order in moves.take_orders()]
    check = next(order for order in checks if isinstance(order, OfferBlocks) and order.is_check)
    assert check.store == other
    replica.pool.release([block])
    moves.moved(BlocksMoved(1, check.move_id, 0, reason="different"))
    assert (moves.num_checks, moves.num_false_blocks) == (1, 1)
    (alarm,) = w.scheduler.journal.take_alarms()
    assert (alarm.event, alarm.fields["store"]) == ("store_untrue", other)
    assert not replica.pool.names, "what rests on it is found no more"
    dropped = {order.store for _, order in moves.take_orders() if isinstance(order, DropBlocks)}
    assert dropped == {other, offer.store}, "what the worker gave away since may be wrong"
    assert not moves.take_orders(), "each is told once"
    assert moves.stores.num_of(offer.store) == 0 and moves.stores.place_for("w0") == offer.store


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
