"""The actor's part in moves of blocks: which processes have a data link, and where the actor sends orders."""

from __future__ import annotations

import pytest

from shared.messages import (
    BlocksMoved,
    DropBlocks,
    Goodbye,
    Hello,
    Leaving,
    LookUpBlocks,
    MayLeave,
    OfferBlocks,
    ServiceName,
    StoreCapacity,
    StoreContents,
    schema_hash,
)
from tests.unit.scheduler.actor.shell import Shell
from tests.unit.scheduler.worlds.fake_worker import FakeWorker, capacity
from tests.unit.scheduler.worlds.moving_world import SPACES

SIZE = capacity(block_space=SPACES[8])


def store(name: str, *, can_look_up: bool = False) -> Hello:
    link = StoreCapacity(f"unix:/run/{name}.blocks", name.encode(), 1 << 30, can_look_up)
    return Hello(ServiceName.STORE, name, f"at-{name}", 1, schema_hash(), store=link)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    """With a worker whose blocks move."""
    made = Shell(monkeypatch)
    made.join("d", "g")
    made.hear(made.hello("w", worker=SIZE))
    made.workers["w"] = FakeWorker(SIZE)
    made.sent.clear()
    return made


def answer(shell: Shell) -> None:
    """One request of a block and two tokens, which the worker computes."""
    shell.ask()
    while shell.actor.core.requests:
        shell.work()


def test_a_worker_is_told_where_the_store_is_that_it_gives_its_blocks_to(shell: Shell) -> None:
    answer(shell)
    shell.hear(store("kept"))
    (offer,) = shell.taken(OfferBlocks, "at-w")
    assert (offer.store, offer.address, offer.secret) == ("kept", "unix:/run/kept.blocks", b"kept")
    shell.hear(BlocksMoved(offer.epoch, offer.move_id, 1, 100))
    assert shell.actor.core.moves.counts.num_stored_blocks == 1
    key = SPACES[8] + offer.names[0]
    shell.hear(StoreContents("kept", [key], []))
    assert shell.actor.core.moves.stores.num_of("kept") == 1
    shell.hear(Goodbye(ServiceName.STORE, "kept", 1))
    assert not shell.actor.core.moves.stores and not shell.taken(OfferBlocks)


def test_a_store_with_a_backend_is_asked_and_one_without_is_not(shell: Shell) -> None:
    names = [bytes([index]) * 16 for index in range(6)]
    moves = shell.actor.core.replicas["w"].moves
    shell.hear(store("without"))
    assert not moves.awaits(names, [], 0)
    shell.hear(store("within", can_look_up=True))
    assert moves.awaits(names, [], 0)
    shell.hear(store("within", can_look_up=True))
    ((where, order),) = [one for one in shell.sent if isinstance(one[1], LookUpBlocks)]
    assert where == "at-within" and order == LookUpBlocks("within", [SPACES[8] + name for name in names])


def test_a_store_is_told_to_forget_what_may_be_wrong(shell: Shell) -> None:
    shell.hear(store("kept"))
    shell.actor.core.moves._to_drop.append("kept")
    shell.actor.core.moves._to_drop.append("gone")
    shell.hear(store("kept"))
    assert [one for one in shell.sent if isinstance(one[1], DropBlocks)] == [("at-kept", DropBlocks("kept"))]


def test_one_that_may_leave_is_told_so_only_in_the_life_that_asked(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another life of it has begun meanwhile: that stays."""
    traffic = shell.actor.traffic
    monkeypatch.setattr(shell.actor.core.handovers, "take_released", lambda: ["w"])
    for epoch, num_told in ((1, 1), (2, 0)):
        traffic._leaving = {"w": Leaving("w", epoch), "other": Leaving("other", 1)}
        traffic.dispatch(0.0)
        assert shell.taken(MayLeave) == [MayLeave("w", epoch)] * num_told
        assert list(traffic._leaving) == ["other"]
    traffic.dispatch(0.0)
    assert not shell.taken(MayLeave), "it has not said that it leaves"
