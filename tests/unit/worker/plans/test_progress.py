"""Busy or stuck: a step may take as long as steps of its size do, and a stuck one ends its worker in the end."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

from services.worker.plans.checks import check_plan
from services.worker.plans.progress import PATIENCE, StepWatch
from services.worker.plans.steps import StepComputation, ThreadSteps
from shared.errors import ProtocolError
from shared.messages import AdmittedSequence, SlidingPlan, SlidingPool, StepPlan, StepResult, WorkerCapacity
from shared.packing import pack_tokens
from shared.requests.sampling import SamplingParams
from shared.transport import MemoryTransport

TIMEOUT = 5.0
CAPACITY = WorkerCapacity(64, 16, 8, 512, 1000, "tiny", "float32", "cpu")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def plan(num_tokens: int = 1, **changes: Any) -> StepPlan:
    fields: dict[str, Any] = {
        "epoch": 1, "step_id": 0, "admitted": [], "rows": [0], "num_computed_tokens": [0],
        "num_scheduled_tokens": [num_tokens], "num_new_blocks": [1], "new_block_ids": [3], "block_copies": [],
        "released_rows": [], "new_block_generations": [1],
    }  # fmt: skip
    return StepPlan(**(fields | changes))


def test_an_idle_worker_is_never_stalled() -> None:
    clock = Clock()
    watch = StepWatch(clock)
    clock.now += 1e6
    assert not watch.is_stalled(TIMEOUT) and not watch.is_computing(TIMEOUT)


def test_of_steps_that_were_begun_the_oldest_is_computed() -> None:
    clock = Clock()
    watch = StepWatch(clock)
    watch.begin(plan(2048))
    clock.now += 1
    watch.begin(plan(1))
    clock.now += 19
    assert watch.seconds == 20
    watch.end()
    assert watch.seconds == 0 and watch.is_computing(TIMEOUT)
    clock.now += 0.5
    watch.end()
    assert not watch.is_computing(TIMEOUT)
    watch.end()
    for num_tokens, slowest in ((2048, 20.0), (1, 0.5)):
        watch.begin(plan(num_tokens))
        assert watch.limit(TIMEOUT) == TIMEOUT + PATIENCE * slowest
        watch.end()


def test_a_long_step_is_busy_where_such_steps_are_long() -> None:
    clock = Clock()
    watch = StepWatch(clock)
    for num_tokens, seconds in ((2048, 20.0), (1, 0.02)):
        watch.begin(plan(num_tokens))
        clock.now += seconds
        assert watch.is_computing(TIMEOUT) and not watch.is_stalled(TIMEOUT)
        watch.end()
    watch.begin(plan(2048))
    clock.now += 60
    assert not watch.is_stalled(TIMEOUT), "four times as long as the slowest"
    clock.now += 60
    assert watch.is_stalled(TIMEOUT) and not watch.is_computing(TIMEOUT) and not watch.is_hopeless(TIMEOUT)
    watch.end()
    assert not watch.is_stalled(TIMEOUT)
    watch.begin(plan(1))
    clock.now += 5.2
    assert watch.is_stalled(TIMEOUT), "a step of one token took 20 ms before"
    clock.now += 70
    assert watch.is_hopeless(TIMEOUT)


def test_a_size_that_was_never_seen_is_judged_by_smaller_ones() -> None:
    clock = Clock()
    watch = StepWatch(clock)
    watch.begin(plan(64))
    clock.now += 1.0
    watch.end()
    watch.begin(plan(512))
    clock.now += 30.0
    assert not watch.is_stalled(TIMEOUT)
    clock.now += 10.0
    assert watch.is_stalled(TIMEOUT)


def test_a_stuck_step_thread_is_seen_from_outside() -> None:
    release = threading.Event()

    class Stuck:
        def reset(self) -> None: ...

        def holdings(self) -> tuple[list[int], list[int]]:
            return [], []

        def run(self, plan: StepPlan) -> StepResult:
            release.wait(10)
            return StepResult(plan.epoch, plan.step_id, [1], [5])

    steps = ThreadSteps(StepComputation(Stuck()), MemoryTransport(), on_failure=lambda: None)
    steps.submit(plan())
    deadline = time.monotonic() + 5
    while not steps.watch.is_stalled(0.01) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert steps.watch.is_stalled(0.01)
    release.set()
    steps.close()
    assert not steps.watch.is_stalled(0.01)


GOOD = AdmittedSequence(7, pack_tokens([1, 2]), 2, SamplingParams(), 1, [0])


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [0, 1]},
        {"rows": [8]},
        {"rows": [-1]},
        {"rows": [0, 0], "num_computed_tokens": [0, 0], "num_scheduled_tokens": [1, 1], "num_new_blocks": [1, 0]},
        {"num_computed_tokens": []},
        {"num_scheduled_tokens": [-1]},
        {"num_new_blocks": [2]},
        {"num_new_blocks": [2**63]},
        {"new_block_ids": [64]},
        {"new_block_ids": []},
        {"new_block_generations": []},
        {"block_copies": [(0, 64)], "copy_generations": [1]},
        {"block_copies": [(0, 63)]},
        {"released_rows": [8]},
        {"admitted": [AdmittedSequence(8, pack_tokens([1]), 1, SamplingParams(), 1, [0])]},
        {"admitted": [AdmittedSequence(0, b"\x01\x02", 1, SamplingParams(), 1, [0])]},
    ],
)
def test_a_plan_of_no_scheduler_is_dropped(changes: dict[str, Any]) -> None:
    check_plan(plan(admitted=[GOOD], released_rows=[7], block_copies=[(0, 63)], copy_generations=[1]), CAPACITY)
    with pytest.raises(ProtocolError):
        check_plan(plan(**changes), CAPACITY)


STATES = msgspec.structs.replace(CAPACITY, keeps_states=True, num_snapshots=3)


@pytest.mark.parametrize(
    "changes",
    [
        {"state_forks": [(8, 0)]},
        {"state_forks": [(0, -1)]},
        {"state_loads": [(0, 3, 1)]},
        {"state_loads": [(8, 0, 1)]},
        {"state_saves": [(0, -1, 1)]},
        {"state_saves": [(0, 2, 1), (1, 2, 1)]},
        {"state_loads": [(1, 0, 1)], "state_forks": [(1, 0)]},
    ],
)
def test_states_of_no_scheduler_are_dropped(changes: dict[str, Any]) -> None:
    good = plan(state_forks=[(1, 0)], state_loads=[(7, 2, 1)], state_saves=[(0, 2, 2)])
    check_plan(good, STATES)
    for one, capacity in ((plan(**changes), STATES), (good, CAPACITY)):
        with pytest.raises(ProtocolError):
            check_plan(one, capacity)


WINDOWS = msgspec.structs.replace(CAPACITY, sliding=[SlidingPool(16, 8)])


@pytest.mark.parametrize(
    "sliding",
    [
        [SlidingPlan([0], [1], [3], [1]), SlidingPlan([0], [1], [3], [1])],
        [SlidingPlan([], [1], [3], [1])],
        [SlidingPlan([-1], [1], [3], [1])],
        [SlidingPlan([0], [], [3], [1])],
        [SlidingPlan([0], [2], [3], [1])],
        [SlidingPlan([0], [1], [8], [1])],
        [SlidingPlan([0], [1], [3], [])],
        [SlidingPlan([0], [0], [], [], [(0, 8)], [1])],
        [SlidingPlan([0], [0], [], [], [(0, 7)], [])],
    ],
)
def test_windows_of_no_scheduler_are_dropped(sliding: list[SlidingPlan]) -> None:
    check_plan(plan(sliding=[SlidingPlan([2], [1], [7], [1], [(0, 7)], [1])]), WINDOWS)
    with pytest.raises(ProtocolError):
        check_plan(plan(sliding=sliding), WINDOWS)
    with pytest.raises(ProtocolError):
        check_plan(plan(sliding=[SlidingPlan([0], [1], [3], [1])]), CAPACITY)
