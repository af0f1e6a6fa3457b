"""Executes plans in order, in the caller's thread or in one of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from services.worker.plan_sequencer import PlanSequencer, RowHolder, Work, note_refused
from services.worker.progress import StepWatch
from shared.actor.executor import Executor, InlineExecutor, ThreadExecutor
from shared.messages import Holdings, StepPlan, StepResult
from shared.transport import Transport


class StepRunner(RowHolder, Protocol):
    """What steps need of a model runner."""

    def run(self, plan: StepPlan) -> StepResult: ...


class Steps(Executor[Work], Protocol):
    """Takes plans.  `watch` times the step that is computed now."""

    watch: StepWatch


class StepComputation:
    """Runs the plans that are due, one in each turn."""

    def __init__(self, runner: StepRunner, watch: StepWatch) -> None:
        self._runner = runner
        self._watch = watch
        self._sequencer = PlanSequencer(runner)
        self._waiting: deque[Work] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def apply(self, work: Work) -> None:
        self._waiting.append(work)

    def turn(self) -> list[StepResult | Holdings]:
        due = self._sequencer.take(self._waiting.popleft())
        if not isinstance(due, StepPlan):
            return [due] if due is not None else []
        self._watch.begin(due)
        result = self._runner.run(due)
        self._watch.end()
        note_refused(result)
        return [result]


class InlineSteps(InlineExecutor[Work]):
    """Runs each plan within `submit`: for tests in one thread."""

    def __init__(self, runner: StepRunner, transport: Transport) -> None:
        self.watch = StepWatch()
        super().__init__(StepComputation(runner, self.watch), transport)


class ThreadSteps(ThreadExecutor[Work]):
    """Runs plans in one thread, on one stream: the scheduler's release fence depends on that."""

    def __init__(self, runner: StepRunner, transport: Transport, on_failure: Callable[[], None]) -> None:
        self.watch = StepWatch()
        super().__init__(StepComputation(runner, self.watch), transport, name="step", on_failure=on_failure)
