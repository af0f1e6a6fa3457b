"""Executes plans in order, in the caller's thread or in one of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from services.worker.blocks.block_desk import BlockDesk
from services.worker.plans.plan_sequencer import PlanSequencer, RowHolder, Work, note_refused
from services.worker.plans.progress import StepWatch
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


class PlanComputation(ABC):
    """A `shared.actor.executor.Computation` of plans, and of what comes in line with them."""

    def __init__(self, runner: RowHolder) -> None:
        self.desk: BlockDesk | None = None  # None: no blocks move here
        self.watch = StepWatch()
        self._waiting: deque[Work] = deque()
        self._sequencer = PlanSequencer(runner)

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def apply(self, work: Work) -> None:
        self._waiting.append(work)

    @abstractmethod
    def turn(self) -> Sequence[StepResult | Holdings | BlocksMoved]: ...

    def _continues(self) -> bool:
        """Whether the oldest work is the next plan: any other work waits until no step is on its way."""
        return bool(self._waiting) and self._sequencer.is_next(self._waiting[0])

    def _take(self) -> StepPlan | Sequence[Holdings | BlocksMoved]:
        """The oldest work, if it is a plan that is due; else what there is to answer to it."""
        due = self._sequencer.take(self._waiting.popleft())
        if isinstance(due, StepPlan):
            return due
        if isinstance(due, Holdings):
            return [due]
        return self.desk.take(due) if self.desk is not None and due is not None else []


class StepComputation(PlanComputation):
    """Runs the plans that are due, one in each turn."""

    def __init__(self, runner: StepRunner) -> None:
        super().__init__(runner)
        self._runner = runner

    def turn(self) -> Sequence[StepResult | Holdings | BlocksMoved]:
        due = self._take()
        if not isinstance(due, StepPlan):
            return due
        self.watch.begin(due)
        result = self._runner.run(due)
        self.watch.end()
        note_refused(result)
        return [result]


class InlineSteps(InlineExecutor[Work]):
    """Runs each plan within `submit`: for tests in one thread."""

    def __init__(self, runner: StepRunner, transport: Transport) -> None:
        self._steps = StepComputation(runner)
        self.watch = self._steps.watch
        super().__init__(self._steps, transport)

    def move_by(self, desk: BlockDesk) -> None:
        self._steps.desk = desk


class ThreadSteps(ThreadExecutor[Work]):
    """Runs plans in one thread, on one stream: the scheduler's release fence depends on that."""

    def __init__(
        self,
        steps: PlanComputation,
        transport: Transport,
        on_failure: Callable[[], None],
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.watch = steps.watch
        self._steps = steps
        super().__init__(steps, transport, name="step", on_failure=on_failure, within=within)

    def move_by(self, desk: BlockDesk) -> None:
        self._steps.desk = desk
