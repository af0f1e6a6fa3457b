"""Steps of a pipeline: parts are begun ahead, never two with one row, and all that is no next plan waits for them."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from services.worker.plans.pipelined import PipelinedComputation
from services.worker.plans.steps import ThreadSteps
from shared.messages import Holdings, ReportHoldings, StepPlan, StepResult
from tests.unit.worker.plans.test_overlapped import Line
from tests.unit.worker.plans.test_plan_parts import decode


class Stages:
    """Remembers what is begun and finished, and on which rows."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, list[int]]] = []
        self.begun: list[StepPlan] = []
        self.most = self.num_resets = 0

    def reset(self) -> None:
        assert not self.begun
        self.num_resets += 1

    def holdings(self) -> tuple[list[int], list[int]]:
        assert not self.begun
        return [0], [7]

    def begin(self, plan: StepPlan) -> StepPlan:
        for other in self.begun:
            assert not set(plan.rows) & set(other.rows)
        self.begun.append(plan)
        self.most = max(self.most, len(self.begun))
        self.log.append(("begin", plan.step_id, plan.rows))
        return plan

    def finish(self, begun: StepPlan) -> StepResult:
        assert self.begun.pop(0) is begun
        self.log.append(("finish", begun.step_id, begun.rows))
        return StepResult(begun.epoch, begun.step_id, [1] * len(begun.rows), list(begun.rows))


def plan(step_id: int, rows: list[int], **changes: Any) -> StepPlan:
    return msgspec.structs.replace(decode(rows), step_id=step_id, **changes)


def run(steps: PipelinedComputation[StepPlan]) -> list[Any]:
    answers: list[Any] = []
    while not steps.is_idle:
        answers += steps.turn()
    return answers


def test_the_next_plan_begins_while_parts_of_this_one_are_on_their_way() -> None:
    stages = Stages()
    steps = PipelinedComputation(stages, 2)
    for step_id in range(3):
        steps.apply(plan(step_id, [0, 1, 2, 3]))
    results = run(steps)
    assert [(one.step_id, one.sampled_token_ids) for one in results] == [(i, [0, 1, 2, 3]) for i in range(3)]
    first, second = [0, 1], [2, 3]
    assert stages.log[:6] == [
        ("begin", 0, first),
        ("begin", 0, second),
        ("finish", 0, first),
        ("begin", 1, first),
        ("finish", 0, second),
        ("begin", 1, second),
    ]
    assert stages.most == 2 and all(one.device_time >= 0 for one in results)


def test_a_single_row_is_never_on_its_way_twice() -> None:
    stages = Stages()
    steps = PipelinedComputation(stages, 3)
    for step_id in range(3):
        steps.apply(plan(step_id, [5]))
    assert len(run(steps)) == 3 and stages.most == 1


def test_reports_and_newer_epochs_wait_for_what_is_on_its_way() -> None:
    stages = Stages()
    steps = PipelinedComputation(stages, 2)
    steps.apply(plan(0, [0, 1]))
    steps.apply(ReportHoldings(1, 9, 1))
    steps.apply(plan(1, [0, 1]))
    steps.apply(plan(0, [0, 1], epoch=2))
    steps.apply(plan(2, [0, 1]))  # of the epoch that has ended
    answers = run(steps)
    assert [type(one) for one in answers] == [StepResult, Holdings, StepResult, StepResult]
    assert [(one.epoch, getattr(one, "step_id", None)) for one in answers] == [(1, 0), (1, None), (1, 1), (2, 0)]
    assert stages.num_resets == 2


def test_a_missing_plan_is_reported_behind_the_results_before_it() -> None:
    steps = PipelinedComputation(Stages(), 2)
    steps.apply(plan(0, [0, 1]))
    steps.apply(plan(2, [0, 1]))
    result, missing = run(steps)
    assert isinstance(result, StepResult) and isinstance(missing, Holdings)
    assert (missing.report_id, missing.due_step_id) == (0, 1)


def test_results_leave_by_the_thread_of_steps() -> None:
    line = Line()
    steps = ThreadSteps(PipelinedComputation(Stages(), 2), line, on_failure=lambda: None)
    for step_id in range(4):
        steps.submit(plan(step_id, [0, 1, 2]))
    deadline = time.monotonic() + 10
    while len(line.sent) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    steps.close()
    assert line.sent == [0, 1, 2, 3]
