"""A log line for each step, and the tokens of steps as a histogram."""

from __future__ import annotations

import msgspec

from services.scheduler.draft_length.proposal import NO_DRAFTS, VerifiableDrafts
from services.scheduler.state.policy import Policy
from services.scheduler.state.step import Step
from services.scheduler.telemetry.steplog import StepLog, StepMeter, num_new_prompt_tokens, num_prompt_tokens
from shared.messages import StepResult
from tests.unit.scheduler.worlds.world import World


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
    assert meter.tokens.sum == 5 + 1, "the prompt's and the one that was generated"


def test_times_are_milliseconds_with_three_places_and_a_new_life_forgets_the_old_one_s_steps() -> None:
    world = World(Policy(), workers=2)
    log = StepLog()
    for index in range(4):
        world.add(f"r{index}", [1 + index, 2, 3], max_tokens=9)
    sent = {}
    for name, replica in world.scheduler.replicas.items():
        plan = world.scheduler.schedule(name, 10.0)
        assert plan is not None
        log.planned(replica, plan, 10.0)
        sent[name] = plan
    first, second = world.scheduler.replicas.values()
    result = StepResult(second.epoch, 0, [], [], device_time=0.00012345)
    line = log.answered(second, second.in_flight[0], result, 10.0012344)
    assert line is not None and (line["ms"], line["device_ms"]) == (1.234, 0.123)
    assert (line["num_blocks"], line["num_used_blocks"]) == (64, 64 - second.pool.num_available)
    log.planned(second, sent["w1"], 11.0)
    log.planned(first, msgspec.structs.replace(sent["w0"], epoch=99), 12.0)
    old = StepResult(first.epoch, 0, [], [])
    assert log.answered(first, first.in_flight[0], old, 13.0) is None, "what was in flight is never answered"
    assert log.answered(first, first.in_flight[0], msgspec.structs.replace(old, epoch=99), 13.0) is not None
    assert log.answered(second, second.in_flight[0], result, 13.0) is not None, "another worker's stays"


def test_tokens_that_go_on_are_no_prompt_s() -> None:
    drafts = [NO_DRAFTS, NO_DRAFTS, VerifiableDrafts([1, 2, 3]), NO_DRAFTS, NO_DRAFTS]
    step = Step(num_scheduled=[1, 5, 4, 3, 2], drafts=drafts)
    assert num_prompt_tokens(step) == 5 + 3 + 2


def test_of_a_step_that_ends_a_prompt_the_prompt_s_tokens_are_new() -> None:
    world = World(Policy(max_num_batched_tokens=8))
    world.add("a", list(range(1, 13)), max_tokens=4)
    replica = world.scheduler.replicas["w0"]
    numbers = []
    for _ in range(4):
        assert world.plan("w0") is not None
        numbers.append(num_new_prompt_tokens(replica.in_flight[-1]))
        world.answer("w0")
    assert numbers == [8, 4, 0, 0]
