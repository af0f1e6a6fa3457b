"""Who has work and makes no step; and who is merely busy, idle or waiting for a worker."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.membership.roster import Membership
from services.scheduler.state.policy import Policy
from services.scheduler.telemetry.stalls import StallWatch
from shared.messages import DraftCapacity, Heartbeat, Hello, ServiceName, WorkerCapacity
from tests.unit.scheduler.worlds.world import World


def test_a_worker_with_work_and_no_step_is_stalled() -> None:
    world = World(Policy(), workers=1)
    watch = StallWatch(5.0)
    replicas = world.scheduler.replicas

    def look(now: float, *computing: str) -> list[str]:
        return watch.look(replicas.values(), computing, now)

    assert look(0) == [] == look(100), "idle"
    world.add("r0", [1, 2, 3], max_tokens=200)
    assert look(101) == []
    assert world.scheduler.schedule("w0") is not None
    assert look(103) == look(106) == [], "a plan was sent at 103"
    assert look(108.1) == ["w0"], "and never answered"
    assert look(110, "w0") == [], "but the worker says that it computes"
    assert look(114) == []
    assert look(116) == ["w0"]


def test_steps_that_come_are_no_stall_however_long_the_work_waits() -> None:
    world = World(Policy(), workers=1, num_blocks=20)
    watch = StallWatch(5.0)
    for index in range(8):
        world.add(f"r{index}", [index + 1] * 30, max_tokens=60)
    for now in range(0, 400, 4):
        world.step()
        assert watch.look(world.scheduler.replicas.values(), (), float(now)) == []


def hello(worker: WorkerCapacity | None = None, draft: DraftCapacity | None = None) -> Hello:
    return Hello(ServiceName.WORKER, "w", "a", 1, "s", worker, draft)


@pytest.mark.parametrize("field", ["num_blocks", "block_size", "max_num_seqs", "max_model_len", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1, 2**40, 2**64 - 1])
def test_nobody_offers_what_nobody_has(field: str, value: int) -> None:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 8}
    sizes |= {"max_model_len": 512, "vocab_size": 1000}
    troupe = Membership()
    assert troupe.refusal(hello(WorkerCapacity(**sizes, model="m", dtype="d", device="c")), "s") is None
    offer = WorkerCapacity(**(sizes | {field: value}), model="m", dtype="d", device="c")
    if (field, value) != ("vocab_size", 0):
        assert field in (troupe.refusal(hello(offer), "s") or "")
    draft = {"num_rows": 8, "max_model_len": 512, "vocab_size": 1000}
    if field in draft and (field, value) != ("vocab_size", 0):
        assert field in (troupe.refusal(hello(draft=DraftCapacity(**(draft | {field: value}), model="m")), "s") or "")


def test_what_a_heartbeat_says_is_on_the_roster_until_it_says_otherwise() -> None:
    troupe = Membership()
    troupe.join(hello(), 0.0)
    for stalled, computing in (("stuck", True), ("", False)):
        troupe.heard(Heartbeat(ServiceName.WORKER, "w", 1, 5, "a", stalled, computing), 0.0)
        assert troupe.stalled == ([f"w: {stalled}"] if stalled else [])
        assert troupe.computing == (frozenset({"w"}) if computing else frozenset())
    troupe.heard(Heartbeat(ServiceName.WORKER, "w", 1, 5, "a", "x" * 10_000), 0.0)
    assert len(troupe.stalled[0]) < 300
