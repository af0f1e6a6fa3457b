"""Random events with stores, every invariant checked after each; and faults in the code of moves, which they must find.

PAGEANT_TEST_EVENTS=2000000 pytest tests/unit/scheduler/storms/test_moving_storms.py      200,000 events
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.execution.tables.block_fence import PoolFence
from services.scheduler.lifecycle.assignment import ReplicaAssignment
from services.scheduler.lifecycle.moves import BlockMoves
from services.scheduler.state.moves import ReplicaMoves
from services.scheduler.state.open_moves import OpenMove
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence
from services.worker.blocks.block_desk import Arrived, BlockDesk
from shared.messages import BlocksMoved, FetchBlocks, LookUpBlocks
from tests.unit.scheduler.storms.test_seeded_faults import events_until_caught
from tests.unit.scheduler.worlds.moving_storm import MOVED, MovingStorm

EVENTS = int(os.environ.get("PAGEANT_TEST_EVENTS", "100000")) // 10
STORM = 3000  # events of each, before it settles
ENOUGH = 10_000  # for everything to be seen

Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.timeout(1200)
def test_whatever_becomes_of_moves_no_token_is_wrong_and_no_block_is_lost() -> None:
    seen, done, seed = Counter[str](), 0, 0
    while done < EVENTS:
        storm = MovingStorm(seed)
        storm.run(STORM)
        seen, done, seed = seen + storm.seen, done + storm.world.num_events, seed + 1
    wanted: tuple[str, ...] = (*MOVED, "OfferBlocks", "FetchBlocks", "ServeBlocks", "from workers", "lost",
              "corrupt", "whole", "found in the backend", "left", "num_handed_over", "num_worker_losses")  # fmt: skip
    wanted = (*wanted, "compared ") if EVENTS >= 5 * ENOUGH else wanted
    assert EVENTS < ENOUGH or all(seen[name] for name in wanted), f"the storms were too calm: {seen}"


def fence_skipped_for_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoolFence, "num_agreeing", lambda self, blocks, generations: len(blocks))


def all_named_though_few_came(patch: pytest.MonkeyPatch) -> None:
    moved = ReplicaMoves.moved

    def as_if_all(self: ReplicaMoves, message: BlocksMoved) -> OpenMove | None:
        move = self.open.get(message.move_id)
        count = len(move.order.blocks) if move is not None else message.num_done
        return moved(self, msgspec.structs.replace(message, num_done=count))

    patch.setattr(ReplicaMoves, "moved", as_if_all)


def answer_of_another_life(patch: pytest.MonkeyPatch) -> None:
    moved = BlockMoves.moved

    def of_any(self: BlockMoves, message: BlocksMoved) -> None:
        for replica in list(self._replicas.values()):
            moved(self, msgspec.structs.replace(message, epoch=replica.epoch))

    patch.setattr(BlockMoves, "moved", of_any)


def piece_in_a_wrong_place(patch: pytest.MonkeyPatch) -> None:
    arrive = BlockDesk._arrive

    def next_place(self: BlockDesk, some: Arrived) -> list[BlocksMoved]:
        num_done = self._num_done.get(some.order.move_id, 0)
        return arrive(self, Arrived(some.order, num_done, some.data, some.is_last))

    patch.setattr(BlockDesk, "_arrive", next_place)


def fetch_never_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaMoves, "expire", lambda self: 0)


def what_is_given_up_stays_held(patch: pytest.MonkeyPatch) -> None:
    def keep(self: ReplicaMoves, move: OpenMove) -> None:
        del self.open[move.order.move_id]
        for name in move.order.names:
            self._arriving.pop(name, None)

    patch.setattr(ReplicaMoves, "_give_up", keep)


def names_arrive_for_ever(patch: pytest.MonkeyPatch) -> None:
    close = ReplicaMoves._close

    def remember(self: ReplicaMoves, move: OpenMove) -> None:
        arriving = dict(self._arriving)
        close(self, move)
        if isinstance(move.order, FetchBlocks):
            self._arriving = arriving

    patch.setattr(ReplicaMoves, "_close", remember)


def order_before_its_plans(patch: pytest.MonkeyPatch) -> None:
    """Orders do not say behind which plan they belong."""
    take = BlockMoves.take_orders

    def at_once(self: BlockMoves) -> Any:
        return [
            (name, order if isinstance(order, LookUpBlocks) else msgspec.structs.replace(order, next_step_id=0))
            for name, order in take(self)
        ]

    patch.setattr(BlockMoves, "take_orders", at_once)


def nothing_ends_for_what_went_over(patch: pytest.MonkeyPatch) -> None:
    """The answers of a worker that is gone are waited for, where a sequence went over before."""
    vacate = ReplicaAssignment.vacate

    def but_for_them(self: ReplicaAssignment, replica: Replica, heard_at: float) -> list[Sequence]:
        in_steps = {one for step in replica.in_flight for one in step.sequences}
        gone = [(one, one.num_pending, one.num_in_flight) for one in in_steps if one.worker != replica.instance]
        vacated = vacate(self, replica, heard_at)
        for one, num_pending, num_in_flight in gone:
            one.num_pending, one.num_in_flight = num_pending, num_in_flight
        return vacated

    patch.setattr(ReplicaAssignment, "vacate", but_for_them)


def over_before_its_answers(patch: pytest.MonkeyPatch) -> None:
    """A sequence goes on at another worker while steps of the former one still have it."""
    hand_over = ReplicaAssignment.hand_over

    def at_once(self: ReplicaAssignment, sequence: Sequence, source: Replica, target: Replica) -> None:
        hand_over(self, sequence, source, target)
        sequence.num_in_flight = 0

    patch.setattr(ReplicaAssignment, "hand_over", at_once)


FAULTS = (
    fence_skipped_for_moves,
    all_named_though_few_came,
    answer_of_another_life,
    piece_in_a_wrong_place,
    fetch_never_given_up,
    what_is_given_up_stays_held,
    names_arrive_for_ever,
    order_before_its_plans,
    nothing_ends_for_what_went_over,
    over_before_its_answers,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_moves_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert events_until_caught(MovingStorm), "no storm noticed"
