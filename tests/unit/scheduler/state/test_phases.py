"""Where the scheduler books a sequence's time: each cause by itself, and the sum always."""

from __future__ import annotations

import random

import pytest

from services.scheduler.state.phases import WorkerClocks
from services.scheduler.state.policy import Policy
from shared.messages import AttachRequest, LatencyBreakdown
from shared.tracing.phases import NUM_PHASES, QUEUE, Phase
from tests.unit.scheduler.worlds.fake_draft import FakeDraft
from tests.unit.scheduler.worlds.timed import STEP, Timed


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 50 for i in range(length)]


def test_a_lone_request_is_computed_and_nothing_else() -> None:
    world = Timed()
    world.ask("a", prompt(12), max_tokens=5)
    world.run()
    seconds = world.seconds("a")
    assert seconds == {Phase.PREFILL: pytest.approx(STEP), Phase.DECODE: pytest.approx(4 * STEP)}
    assert world.last("a").num_chunks == 1
    world.assert_sums()


def test_the_first_tokens_and_the_last_carry_a_breakdown_and_no_others() -> None:
    world = Timed()
    world.ask("a", prompt(12), max_tokens=5)
    world.run()
    first, last = world.breakdowns["a", 0]
    assert sum(first.spent) / 1e6 == pytest.approx(STEP)
    assert sum(last.spent) / 1e6 == pytest.approx(5 * STEP)


def test_a_request_without_a_breakdown_gets_none() -> None:
    world = Timed()
    world.add("a", prompt(12))
    world.run()
    assert not world.breakdowns


def test_a_prompt_in_chunks_is_prefill_all_the_while() -> None:
    world = Timed(Policy(max_num_batched_tokens=16))
    world.ask("a", prompt(40), max_tokens=1)
    world.run()
    assert world.seconds("a") == {Phase.PREFILL: pytest.approx(3 * STEP)}
    assert world.last("a").num_chunks == 3


def test_the_way_from_the_tokenizer_is_a_hop() -> None:
    world = Timed()
    world.ask("late", prompt(4), sent_ago=0.5)
    world.ask("early", prompt(4, 9), sent_ago=-0.5)
    world.run()
    assert world.seconds("late")[Phase.TO_SCHEDULER] == pytest.approx(0.5)
    assert world.seconds("early")[Phase.TO_SCHEDULER] == pytest.approx(-0.5), "its sender's clock is ahead of ours"
    world.assert_sums()


def test_what_arrives_while_steps_are_in_flight_waits_for_a_step() -> None:
    world = Timed()
    world.ask("a", prompt(8), max_tokens=20)
    world.plan("w0")
    world.plan("w0")
    world.ask("b", prompt(8, 20), max_tokens=2)
    world.wait(0.3)
    world.run()
    assert world.seconds("b")[Phase.QUEUE_STEP] == pytest.approx(0.3 + STEP)
    world.assert_sums()


def test_budget() -> None:
    world = Timed(Policy(max_num_batched_tokens=16), max_num_seqs=16)
    world.ask("long", prompt(96), max_tokens=1)
    world.step()
    world.ask("b", prompt(8, 20), max_tokens=1)
    world.run()
    seconds = world.seconds("b")
    assert seconds[Phase.QUEUE_BUDGET] > 2 * STEP
    assert seconds[Phase.QUEUE_BUDGET] > 0.9 * sum(seconds.get(phase, 0.0) for phase in QUEUE) - 2 * STEP
    world.assert_sums()


def test_rows() -> None:
    world = Timed(max_num_seqs=1)
    world.ask("a", prompt(8), max_tokens=20)
    world.step()
    world.ask("b", prompt(8, 20), max_tokens=2)
    world.ask("c", prompt(8, 30), max_tokens=2)
    world.run()
    assert world.seconds("b")[Phase.QUEUE_ROWS] == pytest.approx(18 * STEP, abs=2 * STEP)
    assert world.last("b").num_ahead == 0
    assert world.last("c").num_ahead == 1
    world.assert_sums()


def test_blocks() -> None:
    world = Timed(num_blocks=8, block_size=8)
    world.ask("a", prompt(50), max_tokens=12)
    world.run_steps(3)
    world.ask("b", prompt(40, 20), max_tokens=2)
    world.run()
    assert world.seconds("b")[Phase.QUEUE_BLOCKS] > 5 * STEP
    assert set(world.seconds("b")) & set(QUEUE) <= {Phase.QUEUE_BLOCKS, Phase.QUEUE_STEP}
    world.assert_sums()


def test_fairness() -> None:
    world = Timed(Policy(max_num_batched_tokens=16))
    for index in range(3):
        world.ask(f"greedy-{index}", prompt(48, index), tenant="greedy", max_tokens=2)
    for index in range(3):
        world.ask(f"polite-{index}", prompt(48, 10 + index), tenant="polite", max_tokens=2)
    world.run()
    spent = {name: [world.seconds(f"{name}-{index}") for index in range(3)] for name in ("greedy", "polite")}
    assert any(seconds.get(Phase.QUEUE_FAIRNESS, 0.0) > STEP / 2 for seconds in spent["greedy"]), "others went first"
    assert not any(Phase.QUEUE_FAIRNESS in seconds for seconds in spent["polite"])
    world.assert_sums()


@pytest.mark.parametrize("num_cached", [-1, 0, 8])
def test_what_comes_behind_one_that_ran_before_waits_for_the_same_as_that(num_cached: int) -> None:
    """One that has never run, though of a later rank, went first for the sake of fairness."""
    world = Timed(max_num_seqs=1)
    world.ask("first", prompt(8), tenant="a")
    world.ask("head", prompt(8, 9), tenant="b")
    first, head = (world.scheduler.requests[name].sequences[0] for name in ("first", "head"))
    head.num_cached_tokens = num_cached
    clocks = WorkerClocks(5.0)
    clock = clocks.of("a", 5.0)
    clocks.look([first, head], Phase.QUEUE_BLOCKS, head, 7.0)
    clocks.look([first, head], Phase.QUEUE_BLOCKS, head, 9.0)
    cause = Phase.QUEUE_FAIRNESS if num_cached < 0 else Phase.QUEUE_BLOCKS
    assert clock.totals(9.0)[cause] == pytest.approx(2.0)


def test_siblings_wait_for_the_first_of_them() -> None:
    world = Timed(Policy(max_num_batched_tokens=32, long_prefill_token_threshold=16))
    world.ask("a", prompt(48), n=3, max_tokens=4)
    world.run()
    assert Phase.QUEUE_SIBLING not in world.seconds("a", 0)
    for index in (1, 2):
        assert world.seconds("a", index)[Phase.QUEUE_SIBLING] == pytest.approx(3 * STEP, abs=1.5 * STEP)
    world.assert_sums()


def test_a_shared_prefix_that_another_computes_is_waited_for() -> None:
    world = Timed(Policy(max_num_batched_tokens=64))
    world.ask("a", prompt(33), max_tokens=3)
    world.ask("b", prompt(33), max_tokens=3)
    world.run()
    assert Phase.QUEUE_SIBLING not in world.seconds("a")
    assert Phase.QUEUE_SIBLING in world.seconds("b") or world.last("b").misses != world.last("a").misses
    world.assert_sums()


def test_preemption_and_what_is_computed_again() -> None:
    world = Timed(num_blocks=12, block_size=8, max_num_seqs=4)
    for index in range(3):
        world.ask(f"r{index}", prompt(20, 7 * index), max_tokens=30)
    world.run()
    preempted = [f"r{index}" for index in range(3) if world.last(f"r{index}").num_preemptions]
    assert preempted
    for request_id in preempted:
        seconds = world.seconds(request_id)
        assert seconds[Phase.PREEMPTED] > 0
        assert seconds[Phase.RECOMPUTE] >= STEP / 2
    world.assert_sums()
    world.assert_outputs()


def test_a_lost_worker_costs_what_passed_since_its_last_word() -> None:
    world = Timed()
    world.ask("a", prompt(12), max_tokens=6)
    world.run_steps(3)
    world.plan("w0")
    world.wait(2.5)
    world.scheduler.clock.now = world.now
    world.lose("w0")
    world.wait(1.0)
    world.scheduler.clock.now = world.now
    world.join("w1")
    world.run()
    seconds = world.seconds("a")
    assert seconds[Phase.LOST] == pytest.approx(3.5)
    assert seconds[Phase.RECOMPUTE] == pytest.approx(STEP)
    assert seconds[Phase.DECODE] < 8 * STEP
    world.assert_sums()


def test_who_waited_at_a_lost_worker_waited_for_nothing() -> None:
    world = Timed(max_num_seqs=1)
    world.ask("a", prompt(12), max_tokens=6)
    world.ask("b", prompt(12, 9), max_tokens=2)
    world.run_steps(3)
    world.plan("w0")
    world.wait(2.0)
    world.scheduler.clock.now = world.now
    world.lose("w0")
    world.join("w1")
    world.run()
    assert world.seconds("b")[Phase.LOST] == pytest.approx(2.0)
    world.assert_sums()


def test_waiting_for_drafts() -> None:
    world = Timed(Policy(max_num_batched_tokens=64, num_draft_tokens=2))
    world.join_draft("d", FakeDraft())
    world.ask("a", prompt(12), max_tokens=12)
    waited = 0.0
    for _ in range(60):
        if not world.step():
            break
        if not world.scheduler.replicas["w0"].in_flight and world.scheduler.wake_time is not None:
            world.wait(0.0005)
            waited += 0.0005
    assert waited
    assert waited - 1e-6 <= world.seconds("a")[Phase.DRAFT_WAIT] <= waited + STEP, "and not while it computes"
    world.assert_sums()


def test_what_is_told_again_was_lost() -> None:
    world = Timed()
    world.acknowledges = False
    world.ask("a", prompt(12), max_tokens=3)
    world.run()
    told = world.seconds("a")
    world.wait(4.0)
    world.scheduler.clock.now = world.now
    world.scheduler.set_detokenizers(["d1"])
    world.after()
    assert world.seconds("a") == {**told, Phase.LOST: pytest.approx(4.0)}
    world.assert_sums()


def test_output_told_again_does_not_end_what_is_being_computed_again() -> None:
    world = Timed()
    world.ask("a", prompt(12), max_tokens=6)
    world.run_steps(3)
    world.scheduler.clock.now = world.now
    world.lose("w0")
    world.join("w1")
    world.plan("w1")
    world.scheduler.set_detokenizers(["d1"])
    world.run()
    assert world.seconds("a")[Phase.RECOMPUTE] == pytest.approx(STEP)
    world.assert_sums()


def test_a_client_that_comes_back_begins_anew() -> None:
    world = Timed()
    world.ask("a", prompt(12), max_tokens=20)
    world.run_steps(5)
    world.wait(30.0)
    world.arrivals["a"] = world.now - 0.25
    back = AttachRequest("a", "g1", latency=LatencyBreakdown([250_000] + [0] * (NUM_PHASES - 1), world.now))
    world.breakdowns.clear()
    world.scheduler.attach(back, world.now)
    world.run()
    assert world.seconds("a")[Phase.GATEWAY] == 0.25
    world.assert_sums()


@pytest.mark.parametrize("seed", range(4))
def test_all_time_is_accounted_for_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    world = Timed(Policy(max_num_batched_tokens=48), workers=2, num_blocks=24, block_size=8, max_num_seqs=5)
    for number in range(200):
        roll = rng.random()
        world.wait(rng.random() * 0.02)
        if roll < 0.35:
            world.ask(
                f"r{number}", prompt(rng.randint(2, 60), rng.randrange(4)), tenant=rng.choice(("", "x", "y")),
                salt=rng.choice(("", "s")), max_tokens=rng.randint(1, 40), n=rng.choice((1, 1, 3)),
            )  # fmt: skip
        elif roll < 0.4:
            name = rng.choice(sorted(world.workers))
            world.scheduler.clock.now = world.now
            world.lose(name)
            world.wait(rng.random())
            world.scheduler.clock.now = world.now
            world.join(name)
        else:
            world.step()
    world.run()
    world.assert_sums()
    assert len(world.finished) > 60
    spent = [sum(column) for column in zip(*(world.last(*key).spent for key in world.finished), strict=True)]
    happened = {Phase(number) for number, micros in enumerate(spent) if micros > 0}
    assert happened >= {Phase.PREEMPTED, Phase.RECOMPUTE, Phase.LOST, Phase.QUEUE_BLOCKS, Phase.QUEUE_SIBLING}
    for request_id, index in world.finished:
        assert min(world.last(request_id, index).spent) >= -1, "rounded, no more"
