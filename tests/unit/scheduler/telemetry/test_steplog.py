"""A log line for each step, and the tokens of steps as a histogram."""

from __future__ import annotations

from services.scheduler.state.policy import Policy
from services.scheduler.telemetry.steplog import StepLog, StepMeter
from tests.unit.scheduler.world import World


def test_a_line_says_what_a_step_was_made_of_once_it_is_answered() -> None:
    world = World(Policy())
    log, meter = StepLog(), StepMeter()
    world.add("a", [1, 2, 3, 4, 5], max_tokens=4)
    (replica,) = world.scheduler.replicas.values()
    plan = world.scheduler.schedule(replica.instance, 10.0)
    assert plan is not None
    log.planned(replica, plan, 10.0)
    meter.planned(replica, plan, 10.0)
    step, result = replica.in_flight[0], world.workers[replica.instance].run(plan)
    line = log.answered(replica, step, result, 10.25)
    assert line is not None
    assert (line["worker"], line["step_id"], line["num_tokens"], line["num_prefill_tokens"]) == (
        replica.instance, 0, 5, 5,
    )  # fmt: skip
    assert (line["num_admitted"], line["num_running"], line["num_waiting"], line["ms"]) == (1, 1, 0, 250.0)
    assert line["sequences"] == [["a", 0, 5]]
    assert log.answered(replica, step, result, 10.5) is None, "it was answered"
    assert meter.answered(replica, step, result, 10.25) is None
    assert log.tokens.sum == meter.tokens.sum == 5
