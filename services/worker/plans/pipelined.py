"""Executes plans on a pipeline: parts of plans follow each other through its stages.

A part is begun, at the first stage, as soon as no part before it that is on its way has one of its rows: a row's next
token is computed from its last one.  The last stage finishes parts in order.  So stages compute at the same time, the
first ones on a part of the next plan while the last one samples this plan's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from services.worker.plans.plan_parts import PlanDivider, PlanPart, join_results
from services.worker.plans.plan_sequencer import RowHolder, note_refused
from services.worker.plans.steps import PlanComputation
from shared.messages import BlocksMoved, Holdings, StepPlan, StepResult

Begun = TypeVar("Begun")


class StagedRunner(RowHolder, Protocol[Begun]):
    """What steps of a pipeline need of a model runner.  Steps on their way have no row in common."""

    def begin(self, plan: StepPlan) -> Begun: ...

    def finish(self, begun: Begun) -> StepResult:
        """Of the step that was begun first."""
        ...


class PipelinedComputation(PlanComputation, Generic[Begun]):
    """One part is finished in each turn."""

    def __init__(self, runner: StagedRunner[Begun], num_stages: int) -> None:
        super().__init__(runner)
        self._runner = runner
        self._num_stages = num_stages
        self._divider = PlanDivider(num_stages)
        self._due: deque[PlanPart] = deque()
        self._begun: deque[tuple[PlanPart, Begun, float]] = deque()  # with the time
        self._finished: list[tuple[PlanPart, StepResult]] = []  # of the oldest plan
        self._began = self._ended = 0.0  # the oldest plan, the one before

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._due or self._begun)

    @property
    def num_begun(self) -> int:
        """Parts on their way."""
        return len(self._begun)

    def turn(self) -> Sequence[StepResult | Holdings | BlocksMoved]:
        if self._due or self._begun or self._continues():
            self._begin()
            return self._finish()
        due = self._take()
        if not isinstance(due, StepPlan):
            return due
        self._due += self._divider.divide(due)
        return []

    def _begin(self) -> None:
        """What may be on its way beside what is."""
        while len(self._begun) < self._num_stages:
            if not self._due and self._continues():
                plan = self._take()
                assert isinstance(plan, StepPlan)
                self._due += self._divider.divide(plan)
            if not self._due or any(self._due[0].rows & part.rows for part, *_ in self._begun):
                return
            part = self._due.popleft()
            self._begun.append((part, self._runner.begin(part.plan), time.perf_counter()))

    def _finish(self) -> Sequence[StepResult]:
        part, begun, since = self._begun.popleft()
        if not self._finished:
            self.watch.begin(part.whole)
            self._began = max(since, self._ended)
        self._finished.append((part, self._runner.finish(begun)))
        if not part.is_last:
            return []
        self.watch.end()
        self._ended = time.perf_counter()
        parts, results = [one.plan for one, _ in self._finished], [result for _, result in self._finished]
        self._finished.clear()
        result = join_results(part.whole, results, parts)
        result = msgspec.structs.replace(result, device_time=self._ended - self._began if part.whole.rows else 0.0)
        note_refused(result)
        return [result]
