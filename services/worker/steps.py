"""Executes plans in order, in the caller's thread or in one of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from services.worker.block_desk import BlockDesk
from services.worker.plan_sequencer import PlanSequencer, RowHolder, Work, note_refused
from services.worker.progress import StepWatch
from shared.actor.executor import Executor, InlineExecutor, ThreadExecutor
from shared.messages import BlocksMoved, Holdings, StepPlan, StepResult
from shared.transport import Transport


class StepRunner(RowHolder, Protocol):
    """What steps need of a model runner."""

    def run(self, plan: StepPlan) -> StepResult: ...


class Steps(Executor[Work], Protocol):
    """Takes plans, and moves of blocks where it is given a desk for them.  `watch` times the step that is computed
    now."""

    watch: StepWatch

    def move_by(self, desk: BlockDesk) -> None:
        """Before any work comes: who carries out orders to move blocks."""


class StepComputation:
    """Runs the plans that are due, one in each turn."""

    def __init__(self, runner: StepRunner, watch: StepWatch) -> None:
        self.desk: BlockDesk | None = None  # None: no blocks move here
        self._runner = runner
        self._watch = watch
        self._sequencer = PlanSequencer(runner)
        self._waiting: deque[Work] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def apply(self, work: Work) -> None:
        self._waiting.append(work)

    def turn(self) -> Sequence[StepResult | Holdings | BlocksMoved]:
        due = self._sequencer.take(self._waiting.popleft())
        if isinstance(due, Holdings):
            return [due]
        if not isinstance(due, StepPlan):
            return self.desk.take(due) if self.desk is not None and due is not None else []
        self._watch.begin(due)
        result = self._runner.run(due)
        self._watch.end()
        note_refused(result)
        return [result]


class InlineSteps(InlineExecutor[Work]):
    """Runs each plan within `submit`: for tests in one thread."""

    def __init__(self, runner: StepRunner, transport: Transport) -> None:
        self.watch = StepWatch()
        self._steps = StepComputation(runner, self.watch)
        super().__init__(self._steps, transport)

    def move_by(self, desk: BlockDesk) -> None:
        self._steps.desk = desk


class ThreadSteps(ThreadExecutor[Work]):
    """Runs plans in one thread, on one stream: the scheduler's release fence depends on that."""

    def __init__(self, runner: StepRunner, transport: Transport, on_failure: Callable[[], None]) -> None:
        self.watch = StepWatch()
        self._steps = StepComputation(runner, self.watch)
        super().__init__(self._steps, transport, name="step", on_failure=on_failure)

    def move_by(self, desk: BlockDesk) -> None:
        self._steps.desk = desk
