"""Orders to hold adapters, between the leader of a group and its other ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.description.ranks import Place
from engine.execution.adapters import AdapterBank
from engine.loading.rank_adapters import AdapterHeld, AdapterOrders, HoldAdapter
from engine.loading.ranks import FollowingRank
from engine.lora.adapter import LoraAdapter
from shared.errors import FatalError, ModelError
from shared.ranks.channel import Channel

ADAPTER = LoraAdapter("d1", 8, torch.float32, Path("/loras/a"), ())
Ends = tuple[AdapterOrders, list[Channel]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The leader's, and those of ranks 1 and 2, whose answers it hears."""
    orders, pairs = AdapterOrders(), [socket.socketpair() for _ in range(2)]
    leaders, others = ([Channel(pair[side]) for pair in pairs] for side in (0, 1))
    orders.channels = leaders

    def hear(channel: Channel) -> None:
        try:
            while True:
                orders.answered(channel.receive(AdapterHeld))
        except FatalError:
            orders.end()

    threads = [threading.Thread(target=hear, args=(channel,)) for channel in leaders]
    for thread in threads:
        thread.start()
    yield orders, others
    for channel in (*others, *leaders):
        channel.close()
    for thread in threads:
        thread.join(10)


def follow(channel: Channel, answer: Callable[[HoldAdapter], AdapterHeld]) -> threading.Thread:
    thread = threading.Thread(target=lambda: channel.send(answer(channel.receive(HoldAdapter))))
    thread.start()
    return thread


def test_all_others_hold_it_before_the_leader_goes_on(ends: Ends) -> None:
    orders, others = ends
    seen: list[HoldAdapter] = []

    def hold(order: HoldAdapter) -> AdapterHeld:
        seen.append(order)
        return AdapterHeld(order.number, len(seen))

    threads = [follow(channel, hold) for channel in others]
    orders.hold(3, ADAPTER)
    assert [(one.place, one.path, one.digest) for one in seen] == [(3, "/loras/a", "d1")] * 2
    for thread in threads:
        thread.join()


def test_one_that_cannot_have_it_is_named_and_the_next_order_is_another_one(ends: Ends) -> None:
    orders, others = ends
    for error in ("r: no rank", ""):
        threads = [
            follow(others[0], lambda order: AdapterHeld(order.number, 1)),
            follow(others[1], lambda order, error=error: AdapterHeld(order.number, 2, error)),  # type: ignore[misc]
        ]
        if error:
            with pytest.raises(ModelError, match=r"^rank 2: r: no rank$"):
                orders.hold(0, ADAPTER)
        else:
            orders.answered(AdapterHeld(1, 1, "an answer to the order before"))
            orders.hold(0, ADAPTER)
        for thread in threads:
            thread.join()


def test_a_group_that_ends_meanwhile_is_noticed(ends: Ends) -> None:
    orders, others = ends
    threading.Timer(0.1, others[1].close).start()
    with pytest.raises(FatalError):
        orders.hold(0, ADAPTER)


class Model:
    def __init__(self) -> None:
        self.held: dict[int, str] = {}

    def reserve_adapters(self, count: int, max_rank: int) -> None: ...

    def hold_adapter(self, place: int, adapter: LoraAdapter) -> None:
        self.held[place] = adapter.digest

    def drop_adapter(self, place: int) -> None:
        del self.held[place]


def read(directory: Path, max_rank: int) -> LoraAdapter:
    if directory.name == "broken":
        raise ValueError("embedded null byte")
    if directory.name == "refused":
        raise ModelError("r: no rank")
    return LoraAdapter(directory.name, 8, torch.float32, directory, ())


def test_a_rank_reads_what_it_is_told_and_says_why_it_cannot() -> None:
    one, other = socket.socketpair()
    rank, model = FollowingRank(Place(1, 2), Channel(one), memory=-1), Model()
    order = HoldAdapter(7, 2, "/loras/a", "a")
    assert rank.hold(order) == AdapterHeld(7, 1, "no adapters are served here: max_loras is 0")
    rank.serve(AdapterBank(model, read, count=4, max_rank=8))
    assert rank.hold(order) == AdapterHeld(7, 1) and model.held == {2: "a"}
    assert rank.hold(HoldAdapter(8, 2, "/loras/b", "b")) == AdapterHeld(8, 1) and model.held == {2: "b"}
    for path, reason in (
        ("/loras/refused", "r: no rank"),
        ("/loras/broken", "the adapter cannot be read: ValueError('embedded null byte')"),
        ("/loras/c", "/loras/c has another content than when it was loaded first"),
    ):
        assert rank.hold(HoldAdapter(9, 3, path, "a")) == AdapterHeld(9, 1, reason)
    assert model.held == {2: "b"}
    one.close()
    other.close()
