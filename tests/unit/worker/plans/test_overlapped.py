"""Steps on a device behind the host: launched ahead, answered in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from services.worker.plans.overlapped import OverlappedSteps
from shared.messages import Holdings, Message, ReportHoldings, StepPlan, StepResult
from shared.transport.memory import MemoryOutbox, MemoryTransport

TIMEOUT = 30.0  # after which a step may be stalled


def plan(step_id: int, epoch: int = 1) -> StepPlan:
    return StepPlan(epoch, step_id, [], [0], [0], [1], [0], [], [], [])


class Device:
    """Steps end when they are told to."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.num_resets = 0
        self.ends: dict[int, threading.Event] = {}
        self.broken = -1  # the step that cannot be launched
        self.takes = threading.Event()  # cleared: a launch waits for it
        self.takes.set()

    def reset(self) -> None:
        self.num_resets += 1

    def holdings(self) -> tuple[list[int], list[int]]:
        return [0], [7]

    def launch(self, plan: StepPlan) -> Step:
        assert self.takes.wait(10)
        if plan.step_id == self.broken:
            raise RuntimeError("broken")
        self.launched.append(plan.step_id)
        self.ends.setdefault(plan.step_id, threading.Event())
        return Step(plan, self.ends[plan.step_id])


class Step:
    def __init__(self, plan: StepPlan, end: threading.Event) -> None:
        self._plan = plan
        self._end = end

    def finish(self) -> StepResult:
        assert self._end.wait(10)
        return StepResult(self._plan.epoch, self._plan.step_id, [1], [5])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Recorder(MemoryOutbox):
    def __init__(self, network: MemoryTransport, sent: list[int]) -> None:
        super().__init__(network)
        self._sent = sent  # steps, and reports below zero

    def send(self, address: str, message: Message) -> None:
        assert isinstance(message, StepResult | Holdings)
        self._sent.append(message.step_id if isinstance(message, StepResult) else -message.report_id)


class Line(MemoryTransport):
    """Keeps what is sent over it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def outbox(self) -> Recorder:
        return Recorder(self, self.sent)


class Bench:
    """Steps over a device, and what they send."""

    def __init__(self) -> None:
        self.device = Device()
        self.failures: list[int] = []
        line = Line()
        self.sent = line.sent
        self.steps = OverlappedSteps(self.device, line, on_failure=lambda: self.failures.append(1))

    def end(self, *step_ids: int) -> None:
        for step_id in step_ids:
            self.device.ends.setdefault(step_id, threading.Event()).set()


def test_the_next_is_launched_before_the_first_has_ended() -> None:
    bench = Bench()
    bench.steps.submit(plan(0))
    bench.steps.submit(plan(1))
    until(lambda: bench.device.launched == [0, 1])
    assert bench.sent == []
    assert bench.steps.watch.seconds >= 0.0
    bench.end(1, 0)
    until(lambda: bench.sent == [0, 1])
    bench.steps.close()
    assert bench.steps.failure is None


def test_epochs() -> None:
    bench = Bench()
    bench.end(0, 1)
    for one in (plan(0, epoch=5), plan(0, epoch=4), plan(1, epoch=5), plan(0, epoch=6)):
        bench.steps.submit(one)
    until(lambda: bench.sent == [0, 1, 0])
    bench.steps.close()
    assert bench.device.num_resets == 2


def test_a_report_is_answered_behind_the_plans_before_it() -> None:
    bench = Bench()
    bench.steps.submit(plan(0))
    bench.steps.submit(ReportHoldings(1, 7, 1))
    bench.steps.submit(plan(1))
    until(lambda: bench.device.launched == [0, 1])
    assert bench.sent == []
    bench.end(0, 1)
    until(lambda: bench.sent == [0, -7, 1])
    bench.steps.close()


def test_a_step_that_fails_is_told_and_the_one_before_it_is_answered() -> None:
    bench = Bench()
    bench.device.broken = 1
    for step_id in (0, 1, 2):
        bench.steps.submit(plan(step_id))
    until(lambda: bool(bench.failures))
    bench.end(0)
    until(lambda: bench.sent == [0])
    assert isinstance(bench.steps.failure, RuntimeError)
    assert bench.device.launched == [0]
    bench.steps.close()


def test_a_launch_that_stands_still_is_seen() -> None:
    bench = Bench()
    bench.device.takes.clear()
    bench.steps.submit(plan(0))
    watch = bench.steps.watch
    until(lambda: watch.is_computing(TIMEOUT))
    watch._clock = lambda: time.monotonic() + 1e6
    assert watch.is_stalled(TIMEOUT) and watch.is_hopeless(TIMEOUT), "its worker ends, and says so"
    bench.device.takes.set()
    bench.end(0)
    until(lambda: watch.seconds == 0.0)
    bench.steps.close()
    assert bench.sent == [0]


def test_a_report_does_not_end_the_step_behind_it() -> None:
    bench = Bench()
    for work in (plan(0), ReportHoldings(1, 7, 1), ReportHoldings(1, 8, 1), plan(1)):
        bench.steps.submit(work)
    until(lambda: bench.device.launched == [0, 1])
    bench.end(0)
    until(lambda: bench.sent == [0, -7, -8])
    assert bench.steps.watch.is_computing(TIMEOUT)
    bench.end(1)
    until(lambda: not bench.steps.watch.is_computing(TIMEOUT))
    assert bench.sent == [0, -7, -8, 1]
    bench.steps.close()
