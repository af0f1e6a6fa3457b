"""Random events with adapters among them, and the faults that such storms must find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.scheduler.blocks.prefix_cache import root_hash
from services.scheduler.state.adapters import ReplicaAdapters
from shared.errors import FatalError
from tests.unit.scheduler.lifecycle.adapter_storm import ADAPTERS, AdapterStorm, AdapterWorld

EVENTS, STORMS = 1500, 6
CAUGHT = (AssertionError, FatalError, LookupError)

Fault = Callable[[pytest.MonkeyPatch], None]


def keys_and_values_shared_by_adapters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("services.scheduler.state.sequence.root_hash", lambda salt, adapter="": root_hash(salt))


def as_many_run_as_there_are(patch: pytest.MonkeyPatch) -> None:
    may_start = ReplicaAdapters.may_start
    patch.setattr(ReplicaAdapters, "may_start", lambda self, one: may_start(self, one) or self.holds(one.digest))


def what_is_in_use_makes_room(patch: pytest.MonkeyPatch) -> None:
    order = ReplicaAdapters.order
    patch.setattr(ReplicaAdapters, "order", lambda self, epoch, in_use: order(self, epoch, set()))


def started_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaAdapters, "may_start", lambda self, one: self.want(one) or len(self.running) < self.max_loras)


def stopped_and_counted_as_running(patch: pytest.MonkeyPatch) -> None:
    def stop(self: ReplicaAdapters, digest: str) -> None:
        pass

    patch.setattr(ReplicaAdapters, "stop", stop)


FAULTS: tuple[Fault, ...] = (
    keys_and_values_shared_by_adapters,
    as_many_run_as_there_are,
    what_is_in_use_makes_room,
    started_before_it_is_there,
    stopped_and_counted_as_running,
)


@pytest.mark.parametrize("num_held", [2, 3])
def test_adapters_that_are_always_asked_for_keep_no_other_out(num_held: int) -> None:
    """Two adapters may run, and each has a request that comes before another of its own ends."""
    world = AdapterWorld(max_num_seqs=8)
    world.max_loras, world.num_held = 2, num_held
    world.restart("w0")
    for index in range(60):
        if index == 8:
            world.add("late", [7, 8, 9], max_tokens=4, adapter=ADAPTERS[2])
        for name in ADAPTERS[:2]:
            world.add(f"{name.name}{index}", [1, 2, index], max_tokens=4, adapter=name)
        for _ in range(2):
            world.step()
        if ("late", 0) in world.finished:
            break
    assert 8 < index < 30, "it waits for those that came before it, and for no others"
    world.run()
    world.assert_outputs()


@pytest.mark.parametrize("num_held", [1, 2])
@pytest.mark.parametrize("num_lines", [1, 3])
def test_adapters_of_sequences_that_rest_make_room(num_held: int, num_lines: int) -> None:
    """One adapter may run, and lines of a batch have it: they rest for a request with another one."""
    world = AdapterWorld(max_num_seqs=8)
    world.num_held = num_held
    world.restart("w0")
    for index in range(num_lines):
        world.add(f"line{index}", [1, 2, index], max_tokens=20, is_background=True, adapter=ADAPTERS[0])
    for _ in range(4):
        world.step()
    assert len(world.scheduler.replicas["w0"].running) == num_lines
    world.add("plain", [1, 2, 3], max_tokens=40)
    world.add("live", [4, 5, 6], max_tokens=4, adapter=ADAPTERS[1])
    for _ in range(20):
        world.step()
    assert ("live", 0) in world.finished
    world.run()
    world.assert_outputs()


def test_requests_with_one_adapter_run_together() -> None:
    world = AdapterWorld(max_num_seqs=8)
    for index in range(3):
        world.add(f"r{index}", [1, 2, index], max_tokens=6, adapter=ADAPTERS[0])
    world.add("plain", [1, 2, 9], max_tokens=6)
    for _ in range(3):
        world.step()
    assert len(world.scheduler.replicas["w0"].running) == 4
    world.run()
    world.assert_outputs()


def test_nothing_is_lost_and_every_row_has_its_adapter() -> None:
    most = 0
    for seed in range(STORMS):
        storm = AdapterStorm(seed)
        storm.run(EVENTS)
        most = max(most, storm.world.most_running)
        assert storm.world.finished
    assert most == 2, "the storms were too calm"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_adapters_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(CAUGHT):
        for seed in range(4 * STORMS):
            AdapterStorm(seed).run(EVENTS)
