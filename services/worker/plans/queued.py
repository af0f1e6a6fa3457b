"""Executes plans where a model computes them in a thread of its own: the next one is queued before this one has ended.

One thread here launches steps, waits for the oldest one, and is called back from that when more work comes.  What a
queue cannot take waits for the steps before it, whose results are sent first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from services.worker.plans.plan_sequencer import RowHolder, Work, note_refused
from services.worker.plans.steps import PlanComputation, ThreadSteps
from shared.messages import BlocksMoved, Holdings, StepPlan, StepResult
from shared.transport import Transport

Begun = TypeVar("Begun")


class PendingStep(Protocol):
    """A step on its way."""

    def has_ended(self) -> bool:
        """Waits for its end, or until the runner is called from that."""
        ...

    def finish(self) -> StepResult: ...


class QueueingRunner(RowHolder, Protocol[Begun]):
    """What queued steps need of a model runner."""

    def is_alone(self, plan: StepPlan) -> bool:
        """Whether no step may be on its way when this plan is begun."""
        ...

    def begin(self, plan: StepPlan) -> Begun: ...

    def queue(self, begun: Begun) -> PendingStep | None:
        """None: nothing else may be on its way when it is computed."""
        ...

    def finish(self, begun: Begun) -> StepResult:
        """Compute it at once."""
        ...

    def call(self) -> None:
        """From any thread: a thread that waits, or is about to, goes on."""


class QueuedComputation(PlanComputation, Generic[Begun]):
    """Invariant: while a step is begun that the queue cannot take, no further plan is taken."""

    def __init__(self, runner: QueueingRunner[Begun]) -> None:
        super().__init__(runner)
        self._runner = runner
        self._queued: deque[PendingStep] = deque()
        self._begun: Begun | None = None  # a step that the queue cannot take

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._queued or self._begun)

    def turn(self) -> Sequence[StepResult | Holdings | BlocksMoved]:
        while self._begun is None and self._continues():
            if not self._take_plan():
                break
        if self._queued:
            return self._ended(self._queued.popleft().finish()) if self._queued[0].has_ended() else []
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return self._ended(self._runner.finish(begun))
        due = self._take()
        if not isinstance(due, StepPlan):
            return due
        self._begin(due)
        return []

    def _take_plan(self) -> bool:
        """Begin the next plan.  False: it has to wait for the steps that are queued."""
        plan = self._waiting[0]
        assert isinstance(plan, StepPlan)
        if self._queued and self._runner.is_alone(plan):
            return False
        self._sequencer.take(self._waiting.popleft())
        self._begin(plan)
        return True

    def _begin(self, plan: StepPlan) -> None:
        self.watch.begin(plan)
        begun = self._runner.begin(plan)
        if (pending := self._runner.queue(begun)) is None:
            self._begun = begun
        else:
            self._queued.append(pending)

    def _ended(self, result: StepResult) -> Sequence[StepResult]:
        self.watch.end()
        note_refused(result)
        return [result]


class QueuedPlans(ThreadSteps):
    """What waits for a step is called when more work comes."""

    def __init__(self, runner: QueueingRunner[Begun], transport: Transport, on_failure: Callable[[], None]) -> None:
        self._call = runner.call
        super().__init__(QueuedComputation(runner), transport, on_failure, torch.inference_mode)

    def submit(self, work: Work) -> None:
        super().submit(work)
        self._call()

    def close(self) -> None:
        self._call()
        super().close()
