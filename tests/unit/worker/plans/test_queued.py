"""Steps in a model's queue: launched ahead, answered in order, and what cannot be queued waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from services.worker.blocks.block_desk import BlockDesk
from services.worker.plans.queued import QueuedPlans
from shared.messages import BlocksMoved, Holdings, Message, OfferBlocks, ReportHoldings, StepPlan, StepResult
from shared.transport.memory import MemoryOutbox, MemoryTransport


def plan(step_id: int, epoch: int = 1) -> StepPlan:
    return StepPlan(epoch, step_id, [], [0], [0], [1], [0], [], [], [])


class Runner:
    """Steps end when they are told to."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.alone: set[int] = set()  # steps
        self.unqueued: set[int] = set()
        self.broken = -1  # the step that cannot be begun
        self.ended: set[int] = set()
        self.changed = threading.Condition()
        self._is_called = False

    def reset(self) -> None:
        self.log.append("reset")

    def holdings(self) -> tuple[list[int], list[int]]:
        return [0], [7]

    def is_alone(self, plan: StepPlan) -> bool:
        return plan.step_id in self.alone

    def begin(self, plan: StepPlan) -> StepPlan:
        if plan.step_id == self.broken:
            raise RuntimeError("broken")
        self.log.append(f"begin {plan.step_id}")
        return plan

    def queue(self, begun: StepPlan) -> Step | None:
        if begun.step_id in self.unqueued:
            return None
        self.log.append(f"queue {begun.step_id}")
        return Step(self, begun)

    def finish(self, begun: StepPlan) -> StepResult:
        self.log.append(f"compute {begun.step_id}")
        return StepResult(begun.epoch, begun.step_id, [1], [5])

    def call(self) -> None:
        with self.changed:
            self._is_called = True
            self.changed.notify_all()

    def end(self, *step_ids: int) -> None:
        with self.changed:
            self.ended.update(step_ids)
            self.changed.notify_all()

    def await_step(self, step_id: int) -> bool:
        with self.changed:
            assert self.changed.wait_for(lambda: step_id in self.ended or self._is_called, 10)
            self._is_called = False
            return step_id in self.ended


class Step:
    def __init__(self, runner: Runner, plan: StepPlan) -> None:
        self._runner, self._plan = runner, plan

    def has_ended(self) -> bool:
        return self._runner.await_step(self._plan.step_id)

    def finish(self) -> StepResult:
        self._runner.log.append(f"finish {self._plan.step_id}")
        return StepResult(self._plan.epoch, self._plan.step_id, [1], [5])


class Blocks:
    """All are in another life, so that orders are answered at once."""

    def read(self, blocks: Sequence[int], generations: Sequence[int]) -> list[Any]:
        return []


class Line(MemoryTransport):
    """Keeps what is sent over it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []

    def outbox(self) -> MemoryOutbox:
        return Recorder(self)


class Recorder(MemoryOutbox):
    def __init__(self, line: Line) -> None:
        super().__init__(line)
        self._sent = line.sent

    def send(self, address: str, message: Message) -> None:
        if isinstance(message, StepResult):
            self._sent.append(f"step {message.step_id}")
        elif isinstance(message, Holdings):
            self._sent.append(f"report {message.report_id}")
        else:
            assert isinstance(message, BlocksMoved)
            self._sent.append(f"move {message.move_id}")


class Bench:
    """Steps over a runner, and what they send."""

    def __init__(self) -> None:
        self.runner, self.failures = Runner(), list[int]()
        line = Line()
        self.sent = line.sent
        self.steps = QueuedPlans(self.runner, line, on_failure=lambda: self.failures.append(1))
        self.steps.move_by(BlockDesk(cast(Any, Blocks()), cast(Any, None)))

    def submit(self, *works: Any) -> None:
        for work in works:
            self.steps.submit(work)

    def close(self) -> None:
        self.steps.close()
        assert self.steps.failure is None and not self.failures


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_plan_that_comes_while_a_step_computes_is_queued_at_once() -> None:
    bench = Bench()
    bench.submit(plan(0))
    until(lambda: "queue 0" in bench.runner.log)
    time.sleep(0.02)  # it waits for the step now
    bench.submit(plan(1))
    until(lambda: "queue 1" in bench.runner.log)
    assert bench.sent == [] and bench.steps.watch.seconds > 0
    bench.runner.end(0)
    until(lambda: bench.sent == ["step 0"])
    bench.submit(plan(2))
    until(lambda: "queue 2" in bench.runner.log)
    bench.runner.end(1, 2)
    until(lambda: bench.sent == ["step 0", "step 1", "step 2"])
    assert bench.steps.watch.seconds == 0
    bench.close()


def test_results_are_sent_before_what_cannot_be_queued_is_computed() -> None:
    bench = Bench()
    bench.runner.unqueued = {2}
    bench.submit(plan(0), plan(1), plan(2), plan(3))
    until(lambda: "begin 2" in bench.runner.log)
    bench.runner.end(1)
    time.sleep(0.02)
    assert bench.sent == []
    bench.runner.end(0)
    until(lambda: bench.sent == ["step 0", "step 1", "step 2"])
    bench.runner.end(3)
    until(lambda: bench.sent[3:] == ["step 3"])
    order = ["begin 2", "finish 0", "finish 1", "compute 2", "begin 3", "queue 3", "finish 3"]
    assert bench.runner.log[-len(order) :] == order
    bench.close()


def test_a_plan_that_overwrites_what_is_read_is_begun_when_all_have_ended() -> None:
    bench = Bench()
    bench.runner.alone = {1}
    bench.submit(plan(0), plan(1), plan(2))
    until(lambda: "queue 0" in bench.runner.log)
    time.sleep(0.02)
    assert bench.runner.log[-1] == "queue 0"
    bench.runner.end(0)
    until(lambda: "queue 2" in bench.runner.log)
    assert bench.runner.log[-5:] == ["finish 0", "begin 1", "queue 1", "begin 2", "queue 2"]
    bench.runner.end(1, 2)
    until(lambda: bench.sent == ["step 0", "step 1", "step 2"])
    bench.close()


def test_reports_and_moves_wait_for_the_steps_before_them() -> None:
    bench = Bench()
    offer = OfferBlocks(1, 5, 1, "store", [b"name"], [3], [1])
    bench.submit(plan(0), ReportHoldings(1, 7, 1), offer, plan(1))
    until(lambda: "queue 0" in bench.runner.log)
    time.sleep(0.02)
    assert bench.sent == [] and "begin 1" not in bench.runner.log
    bench.runner.end(0, 1)
    until(lambda: bench.sent == ["step 0", "report 7", "move 5", "step 1"])
    bench.close()


def test_an_epoch_begins_when_the_steps_of_the_last_one_have_ended() -> None:
    bench = Bench()
    bench.submit(plan(0, epoch=5), plan(0, epoch=4), plan(1, epoch=5), plan(0, epoch=6))
    until(lambda: "queue 0" in bench.runner.log)
    time.sleep(0.02)
    assert bench.runner.log.count("reset") == 1
    bench.runner.end(0, 1)
    until(lambda: bench.sent == ["step 0", "step 1", "step 0"])
    assert bench.runner.log.count("reset") == 2
    bench.close()


def test_a_step_that_fails_is_told() -> None:
    bench = Bench()
    bench.runner.broken = 1
    bench.submit(plan(0), plan(1))
    until(lambda: bool(bench.failures))
    assert isinstance(bench.steps.failure, RuntimeError)
    bench.steps.close()


def test_closing_does_not_wait_for_what_has_not_ended() -> None:
    bench = Bench()
    bench.submit(plan(0), plan(1))
    until(lambda: "queue 1" in bench.runner.log)
    begin = time.monotonic()
    closing = threading.Thread(target=bench.steps.close)
    closing.start()
    bench.runner.end(0)
    closing.join(5)
    assert not closing.is_alive() and time.monotonic() - begin < 5
