"""How fast blocks are fetched that no client waits for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from services.scheduler.state.moves import MOST_FETCH_SECONDS
from services.worker.blocks import mover as mover_module
from services.worker.blocks.block_desk import Arrived, MovableBlocks
from services.worker.blocks.mover import LONGEST_REST, REST_WITHIN, RESTS, BlockMover
from shared.messages import FetchBlocks
from shared.transport import MemoryTransport

NAMES = [bytes([index]) * 16 for index in range(4)]
GROUP = 0.01  # seconds


class FakeBlocks:
    space, block_bytes = b"s" * 16, 1 << 20

    def copy(self, to: Any, of: Any) -> int:
        raise AssertionError("nothing is copied here")


all_asked = threading.Event()


def groups(*args: Any) -> Iterator[int]:
    places = args[5]
    all_asked.wait(20)
    for _ in NAMES:
        places(1)
        time.sleep(GROUP)
        yield 1


Made = tuple[BlockMover, "queue.SimpleQueue[Arrived]"]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    found: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
    mover = BlockMover(cast(MovableBlocks, FakeBlocks()), MemoryTransport(), tmp_path, found.put)
    mover._inward.get_groups = groups  # type: ignore[method-assign,assignment]
    yield mover, found
    mover.close()


def order(*, is_unhurried: bool) -> FetchBlocks:
    blocks = list(range(len(NAMES)))
    return FetchBlocks(1, 1, 0, "w1", NAMES, blocks, [1] * len(NAMES), is_unhurried=is_unhurried)


def fetched(made: Made, *orders: FetchBlocks) -> list[Arrived]:
    """What came last of each."""
    mover, found = made
    all_asked.clear()
    for one in orders:
        mover.fetch(one, len(NAMES))
    all_asked.set()
    pieces = [found.get(timeout=20) for _ in NAMES for _ in orders]
    assert [piece.first for piece in pieces] == [*range(len(NAMES))] * len(orders)
    assert [piece.is_last for piece in pieces] == [False, False, False, True] * len(orders)
    return [piece for piece in pieces if piece.is_last]


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of the mover, in seconds."""
    found: list[float] = []
    sleep = time.sleep

    def counted(seconds: float) -> None:
        if threading.current_thread().name == "mover-in" and seconds != GROUP:
            found.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", counted)
    return found


def test_an_unhurried_fetch_rests_and_its_rests_are_not_what_the_link_takes(made: Made, rests: list[float]) -> None:
    begin = time.monotonic()
    (last,) = fetched(made, order(is_unhurried=True))
    assert rests == [LONGEST_REST] * (len(NAMES) - 1) and LONGEST_REST < RESTS * GROUP
    assert len(NAMES) * GROUP <= last.seconds <= time.monotonic() - begin - sum(rests), "costs are estimated by it"


def test_one_for_which_a_client_waits_does_not_rest(made: Made, rests: list[float]) -> None:
    fetched(made, order(is_unhurried=False))
    assert not rests


def test_one_rests_as_long_as_its_groups_are_short(
    made: Made, rests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_module, "RESTS", 0.1)
    fetched(made, order(is_unhurried=True))
    assert len(rests) == 3 and 0.1 * GROUP <= min(rests) < LONGEST_REST


def test_none_rests_where_another_is_urgent(made: Made, rests: list[float]) -> None:
    """It waits behind the ones before it, and these are as quick as they can be; so is none behind it."""
    fetched(made, order(is_unhurried=True), order(is_unhurried=False), order(is_unhurried=True))
    assert len(rests) == 3, "the last one alone"


def test_rests_end_before_the_scheduler_gives_an_order_up(
    made: Made, rests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from when it came: others may be before it."""
    monkeypatch.setattr(mover_module, "REST_WITHIN", 4.5 * GROUP)  # the first has rested once or twice by then
    fetched(made, *[order(is_unhurried=True)] * 3)
    assert len(rests) <= 2 and MOST_FETCH_SECONDS > 2 * REST_WITHIN
