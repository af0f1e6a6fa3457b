"""Plans over a link that loses, repeats and delays: each runs once, in order, or the scheduler is told."""

from __future__ import annotations

from services.worker.plans.plan_sequencer import PlanSequencer
from shared.messages import Holdings, ReportHoldings, StepPlan


class RowHolder:
    num_resets = 0

    def reset(self) -> None:
        self.num_resets += 1

    def holdings(self) -> tuple[list[int], list[int]]:
        return [3], [77]


def plan(epoch: int, step_id: int) -> StepPlan:
    return StepPlan(epoch, step_id, [], [], [], [], [], [], [], [])


def test_each_plan_runs_once_and_in_order() -> None:
    rows = RowHolder()
    line = PlanSequencer(rows)
    first, second, newer = plan(5, 0), plan(5, 1), plan(6, 0)
    assert [line.take(one) for one in (first, first, second, first)] == [first, None, second, None]
    assert line.take(newer) == newer
    assert line.take(plan(5, 2)) is None, "of a life that is over"
    assert rows.num_resets == 2


def test_a_gap_is_told_and_what_is_due_may_still_come() -> None:
    line = PlanSequencer(RowHolder())
    line.take(plan(5, 0))
    assert line.take(plan(5, 2)) == Holdings(5, 0, next_step_id=2, due_step_id=1)
    assert line.take(plan(5, 1)) == plan(5, 1)


def test_the_first_plan_of_an_epoch_may_be_missing_too() -> None:
    rows = RowHolder()
    line = PlanSequencer(rows)
    assert line.take(plan(5, 1)) == Holdings(5, 0, next_step_id=1, due_step_id=0)
    assert rows.num_resets == 1


def test_a_report_says_what_is_held() -> None:
    line = PlanSequencer(RowHolder())
    line.take(plan(5, 0))
    assert line.take(ReportHoldings(5, 9, 1)) == Holdings(5, 9, 1, 1, [3], [77])
    assert line.take(ReportHoldings(4, 8, 7)) is None
    assert line.take(ReportHoldings(6, 10, 2)) == Holdings(6, 10, 2, 0), "nothing of that epoch has come"
