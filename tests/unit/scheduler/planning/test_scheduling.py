"""What the scheduler decides, step by step; outputs are compared with solo runs by the fake worker's arithmetic."""

from __future__ import annotations

import itertools

import pytest

from services.scheduler.state.policy import Policy
from shared.errors import ProtocolError, RejectCode
from shared.messages import FinishReason, StepResult, StopMatched, StreamLost
from tests.unit.scheduler.worlds.world import World


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 50 for i in range(length)]


def test_requests_join_and_leave_at_any_step() -> None:
    world = World()
    lengths = [3, 20, 5, 11, 2]
    for index, length in enumerate(lengths):
        world.add(f"r{index}", prompt(6, index), max_tokens=length)
    rounds = world.run()
    world.assert_outputs()
    world.assert_idle()
    assert rounds < sum(lengths), "sequences ran together"
    assert rounds <= max(lengths) + 4, "and the batch never waited for its longest to end before taking another in"


def test_a_request_that_arrives_runs_in_the_next_plan() -> None:
    world = World()
    world.add("a", prompt(4), max_tokens=30)
    world.plan("w0")
    world.answer("w0")
    world.add("b", prompt(4, 9))
    plan = world.plan("w0")
    assert plan is not None
    assert len(plan.rows) == 2
    assert plan.num_scheduled_tokens == [1, 4]


def test_decodes_come_before_prefill_chunks_in_the_budget() -> None:
    world = World(Policy(max_num_batched_tokens=16), max_model_len=128)
    world.add("long", prompt(60), priority=0, max_tokens=4)
    world.step()
    world.add("short", prompt(3, 30), max_tokens=20)
    gaps = []
    last = 0
    for round_number in range(60):
        if not world.step():
            break
        if len(world.outputs.get(("short", 0), [])) > last:
            last = len(world.outputs["short", 0])
            gaps.append(round_number)
    assert world.scheduler.counters.num_chunked_prefills >= 3
    assert max(later - earlier for earlier, later in itertools.pairwise(gaps)) == 1, "no decode ever waited"
    world.assert_outputs()


def test_the_budget_and_the_row_limit_hold_in_every_step() -> None:
    world = World(Policy(max_num_batched_tokens=24), max_num_seqs=5)
    for index in range(40):
        world.add(f"r{index}", prompt(1 + index % 30, index), max_tokens=1 + index % 9)
    world.run()
    world.assert_outputs()
    assert len(world.finished) == 40
    assert all(sum(plan.num_scheduled_tokens) <= 24 for plan in world.trace)
    assert max(sum(plan.num_scheduled_tokens) for plan in world.trace) == 24
    assert all(len(plan.rows) <= 5 for plan in world.trace)


def test_two_steps_are_in_flight_and_never_three() -> None:
    world = World()
    world.add("a", prompt(4), max_tokens=10)
    assert world.plan("w0")
    assert world.plan("w0"), "the second is planned before the first is answered"
    assert world.plan("w0") is None
    world.answer("w0")
    assert world.plan("w0")


def test_no_step_is_planned_past_the_last_token() -> None:
    world = World()
    world.add("a", prompt(4), max_tokens=3)
    world.run()
    assert sum(sum(plan.num_scheduled_tokens) for plan in world.trace) == 4 + 2


def test_a_sequence_whose_last_token_is_under_way_takes_no_part_in_the_next_step() -> None:
    world = World(max_model_len=16)
    world.add("a", prompt(4), max_tokens=2)
    world.add("b", prompt(14, 9), max_tokens=50)  # ends at the model's length
    assert [len(plan.rows) for plan in (world.plan("w0"), world.plan("w0")) if plan] == [2, 2]
    world.answer("w0")
    assert world.plan("w0") is None, "both have their last token in the step under way"
    world.run()
    world.assert_outputs()


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_prefix_hits_skip_whole_blocks(block_size: int) -> None:
    world = World(Policy(max_num_batched_tokens=512), block_size=block_size, max_model_len=256)
    shared = prompt(150)
    world.add("a", [*shared, 1, 2], max_tokens=4)
    world.run()
    world.add("b", [*shared, 3, 4], max_tokens=4)
    plan = world.plan("w0")
    assert plan is not None
    hit = 150 // block_size * block_size
    assert plan.num_computed_tokens == [hit]
    assert plan.num_scheduled_tokens == [152 - hit]
    world.run()
    world.assert_outputs()
    assert world.scheduler.counters.num_prefix_cache_hits == hit


def test_a_fully_cached_prompt_still_computes_its_last_block() -> None:
    world = World()
    for name in "ab":
        world.add(name, prompt(16), max_tokens=2)
        world.run()
    assert world.scheduler.counters.num_prefix_cache_hits == 8
    world.assert_outputs()


@pytest.mark.parametrize("budget", [512, 128, 48])
def test_a_prefix_that_many_bring_at_once_is_computed_once(budget: int) -> None:
    world = World(Policy(max_num_batched_tokens=budget), max_num_seqs=32, num_blocks=256, max_model_len=512)
    shared = prompt(160)
    for index in range(32):
        world.add(f"r{index}", [*shared, *prompt(9, index)], max_tokens=3)
    world.run()
    world.assert_outputs()
    prefilled = sum(sum(plan.num_scheduled_tokens) for plan in world.trace) - 32 * 2  # two decode steps each
    assert prefilled == 160 + 32 * 9, "no sequence computed what another was computing"
    assert world.scheduler.counters.num_prefix_cache_hits == 31 * 160


def test_who_waits_for_another_s_blocks_holds_up_nobody() -> None:
    world = World(Policy(max_num_batched_tokens=256), max_num_seqs=8)
    for name, first in (("a", 0), ("like a", 0), ("b", 7)):
        world.add(name, prompt(40, first), max_tokens=2)
    first_plan, second_plan = world.plan("w0"), world.plan("w0")
    assert first_plan is not None and second_plan is not None
    assert [admitted.request_id for admitted in first_plan.admitted] == ["a", "b"]
    assert [admitted.request_id for admitted in second_plan.admitted] == ["like a"]
    assert second_plan.num_computed_tokens[-1] == 32, "a hit, one step later"
    world.run()
    world.assert_outputs()


def test_without_the_prefix_cache_nobody_waits() -> None:
    world = World(Policy(max_num_batched_tokens=256, enable_prefix_caching=False), max_num_seqs=8)
    for name in "ab":
        world.add(name, prompt(40), max_tokens=2)
    plan = world.plan("w0")
    assert plan is not None
    assert plan.num_scheduled_tokens == [40, 40]
    world.run()
    world.assert_outputs()


def test_tenants_do_not_share_blocks() -> None:
    world = World()
    for tenant in ("one", "two", "one"):
        world.add(f"r-{tenant}-{world.num_events}", prompt(20), salt=tenant)
        world.run()
    assert world.scheduler.counters.num_prefix_cache_hits == 16


def test_requests_for_prompt_logprobs_do_not_read_the_cache() -> None:
    world = World()
    world.add("a", prompt(20))
    world.run()
    world.add("b", prompt(20), prompt_logprobs=1)
    plan = world.plan("w0")
    assert plan is not None
    assert plan.num_computed_tokens == [0]


def test_siblings_share_the_prompt_and_copy_one_block_each() -> None:
    world = World()
    world.add("a", prompt(20), n=3, max_tokens=12)
    world.run()
    world.assert_outputs()
    world.assert_idle()
    copies = [copy for plan in world.trace for copy in plan.block_copies]
    assert len(copies) == 2, "one block copy for each sibling but the first"
    assert len({source for source, _ in copies}) == 1
    assert sum(sum(plan.num_scheduled_tokens) for plan in world.trace) < 2 * 20 + 3 * 12, "one prefill, not three"
    assert world.outputs["a", 0] != world.outputs["a", 1]


def test_preempted_requests_end_as_if_undisturbed() -> None:
    world = World(num_blocks=14, max_num_seqs=8)
    for index in range(8):
        world.add(f"r{index}", prompt(10, index * 3), max_tokens=40)
    world.run()
    world.assert_outputs()
    world.assert_idle()
    assert len(world.finished) == 8
    assert world.scheduler.counters.num_preemptions > 0


def test_the_victim_is_the_cheapest_to_recompute() -> None:
    world = World(Policy(max_num_batched_tokens=64), num_blocks=14, max_num_seqs=4)
    world.add("first", prompt(8), max_tokens=70)
    world.add("big", prompt(40, 10), max_tokens=60)
    world.add("small", prompt(8, 30), max_tokens=60)
    victims: list[str] = []
    while world.step():
        notes = world.scheduler.journal.take()
        victims += [note.header.request_id for note in notes if note.event == "sequence_preempted"]
    assert victims[0] == "small"
    assert "first" not in victims, "the most urgent always goes on"
    world.assert_outputs()


def test_priority_runs_the_smaller_value_first_and_preempts_the_larger() -> None:
    world = World(Policy(max_num_batched_tokens=32, scheduling_policy="priority"), max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -1), ("middle", 2)):
        world.add(name, prompt(4), priority=priority, max_tokens=3)
    order = []
    while world.step():
        order += [key[0] for key in world.finished if key[0] not in order]
    assert order == ["high", "middle", "low"]


def test_first_come_first_served() -> None:
    world = World(max_num_seqs=1)
    for index in range(5):
        world.add(f"r{index}", prompt(4 + index), priority=-index, max_tokens=2)
    order: list[str] = []
    while world.step():
        order += [key[0] for key in world.finished if key[0] not in order]
    assert order == [f"r{index}" for index in range(5)], "priorities are ignored under this policy"


def test_aborted_blocks_are_free_at_once() -> None:
    world = World()
    world.add("a", prompt(30), max_tokens=60)
    world.step()
    world.step()
    world.abort("a")
    pool = world.scheduler.replicas["w0"].pool
    assert pool.num_available == pool.size
    assert not world.scheduler.abort("a"), "a second abort finds nothing, and does no harm"
    world.run()


def test_a_lost_worker_s_requests_go_on_elsewhere() -> None:
    world = World(workers=2)
    for index in range(6):
        world.add(f"r{index}", prompt(12, index), max_tokens=20)
    for _ in range(5):
        world.step()
    assert all(replica.running for replica in world.scheduler.replicas.values()), "both workers had work"
    world.lose("w0")
    world.run()
    world.assert_outputs()
    assert len(world.finished) == 6
    assert world.scheduler.counters.num_worker_losses == 1


def test_two_workers_that_die_together_cost_no_request() -> None:
    """What ran on the one is sent to the other before its death is noticed too."""
    world = World(workers=2)
    world.add("bystander", prompt(12), max_tokens=20)
    world.step()
    (first,) = [name for name, replica in world.scheduler.replicas.items() if replica.running]
    world.plan(first)
    second = "w1" if first == "w0" else "w0"
    world.lose(first)
    world.plan(second)
    assert world.scheduler.replicas[second].in_flight
    world.lose(second)
    for name in ("w0", "w1"):
        world.join(name)
    world.run()
    assert not world.rejected
    world.assert_outputs("bystander")


def test_a_request_at_three_worker_deaths_fails_alone() -> None:
    world = World()
    world.add("poison", prompt(12), max_tokens=50)
    for _ in range(3):
        world.plan("w0")
        world.lose("w0")
        world.join("w0")
    assert world.rejected == {"poison": RejectCode.INTERNAL}
    world.add("healthy", prompt(5))
    world.run()
    world.assert_outputs("healthy")


def test_a_late_result_of_an_old_life_is_ignored() -> None:
    world = World()
    world.add("a", prompt(12), max_tokens=5)
    plan = world.plan("w0")
    assert plan is not None
    late = world.workers["w0"].run(plan)
    world.lose("w0")
    world.join("w0")
    assert not world.scheduler.apply("w0", late)
    world.run()
    world.assert_outputs("a")


def test_a_result_that_was_not_asked_for_is_a_protocol_error() -> None:
    world = World()
    world.add("a", prompt(12))
    plan = world.plan("w0")
    assert plan is not None
    for result in (
        StepResult(plan.epoch, plan.step_id + 1, [1], [3]),
        StepResult(plan.epoch, plan.step_id, [0], []),
        StepResult(plan.epoch, plan.step_id, [1, 1], [3, 4]),
    ):
        with pytest.raises(ProtocolError):
            world.scheduler.apply("w0", result)
    world.run()
    world.assert_outputs("a")


def test_streams_of_a_lost_detokenizer_are_told_again_from_the_start() -> None:
    world = World()
    world.add("a", prompt(5), max_tokens=12)
    for _ in range(5):
        world.step()
    world.scheduler.set_detokenizers(["d1"])
    batches = world.scheduler.outbound.take_batches()
    assert list(batches) == ["d1"]
    assert [stream.header.request_id for stream in batches["d1"].opened] == ["a"]
    assert batches["d1"].sequences[0].offset == 0
    assert batches["d1"].sequences[0].token_ids == world.outputs["a", 0]


def test_the_end_of_a_stream_survives_the_detokenizer_that_had_it() -> None:
    world = World()
    world.acknowledges = False
    world.add("a", prompt(5), max_tokens=6, n=2)
    world.run()
    world.finished.clear()
    world.outputs.clear()
    assert not world.scheduler.requests
    world.scheduler.set_detokenizers([])
    world.scheduler.set_detokenizers(["d1"])
    world.after()
    assert world.finished == {("a", 0): FinishReason.LENGTH, ("a", 1): FinishReason.LENGTH}
    world.assert_outputs()
    world.scheduler.stream_lost(StreamLost("a", 1))
    (batch,) = world.scheduler.outbound.take_batches().values()
    assert all(tokens.finish_reason for tokens in batch.sequences)
    assert world.scheduler.abort("a"), "the gateway has everything"
    assert world.scheduler.counters.num_aborted == 0
    world.assert_idle()


def test_thanks_may_come_before_the_detokenizer_s_word_of_an_end() -> None:
    world = World()
    world.add("a", prompt(5), max_tokens=30, stop=["x"], n=2)
    for _ in range(4):
        world.step()
    assert len(world.scheduler.requests["a"].unfinished) == 2
    assert world.scheduler.abort("a", has_everything=True)
    world.scheduler.stop_matched(StopMatched("a", 0, 4))
    assert (world.scheduler.counters.num_finished, world.scheduler.counters.num_aborted) == (1, 0)
    world.after()
    world.run()
    world.assert_idle()


def test_what_no_gateway_acknowledges_is_forgotten_in_time() -> None:
    world = World()
    world.acknowledges = False
    world.add("a", prompt(5), max_tokens=3)
    world.run()
    world.scheduler.expire(now=100.0)
    assert world.scheduler.finished
    world.scheduler.expire(now=161.0)
    world.assert_idle()


def test_a_lost_stream_is_opened_again() -> None:
    world = World()
    world.add("a", prompt(5), max_tokens=12)
    for _ in range(4):
        world.step()
    world.scheduler.stream_lost(StreamLost("a", 0))
    (batch,) = world.scheduler.outbound.take_batches().values()
    assert len(batch.opened) == 1
    assert batch.sequences[0].token_ids == world.outputs["a", 0]
    world.run()
    world.assert_outputs()


def test_a_stop_string_ends_its_sequence_only() -> None:
    world = World()
    world.add("a", prompt(5), n=2, max_tokens=30)
    for _ in range(6):
        world.step()
    world.scheduler.stop_matched(StopMatched("a", 0, 2))
    world.run()
    world.assert_idle()
    assert ("a", 1) in world.finished
    assert ("a", 0) not in world.finished


def test_eos_and_stop_ids_end_a_sequence_and_min_tokens_delays_them() -> None:
    free = World()
    free.add("a", prompt(7), max_tokens=60)
    free.run()
    output = free.outputs["a", 0]
    stop = output[4]
    world = World()
    world.add("stop", prompt(7), max_tokens=60, stop_token_ids=[stop])
    world.add("later", prompt(7), max_tokens=60, stop_token_ids=[stop], min_tokens=output.index(stop) + 2)
    world.run()
    world.assert_outputs()
    assert world.finished["stop", 0] is FinishReason.STOP
    assert len(world.outputs["stop", 0]) == output.index(stop) + 1
    assert len(world.outputs["later", 0]) > output.index(stop) + 1


def test_without_a_worker_no_length_is_known() -> None:
    world = World()
    assert (world.scheduler.intake.max_model_len, world.scheduler.intake.max_input_length) == (128, 127)
    world.lose("w0")
    assert (world.scheduler.intake.max_model_len, world.scheduler.intake.max_input_length) == (0, 0)


def test_a_prompt_over_the_set_input_length_is_rejected() -> None:
    world = World(Policy(max_num_batched_tokens=32, max_input_length=20))
    assert world.scheduler.intake.max_input_length == 20
    world.add("longest", prompt(20), max_tokens=3)
    world.add("too-long", prompt(21), max_tokens=3)
    world.run()
    world.assert_outputs()
    assert world.rejected == {"too-long": RejectCode.INVALID_ARGUMENT}


def test_an_input_length_over_the_models_is_the_models() -> None:
    world = World(Policy(max_num_batched_tokens=32, max_input_length=500))
    assert (world.scheduler.intake.max_model_len, world.scheduler.intake.max_input_length) == (128, 127)


def test_the_model_length_ends_a_sequence() -> None:
    world = World(max_model_len=20)
    world.add("a", prompt(15), max_tokens=50)
    world.run()
    assert world.finished["a", 0] is FinishReason.LENGTH
    assert len(world.outputs["a", 0]) == 5


def test_without_chunking_a_prompt_waits_for_a_whole_budget() -> None:
    policy = Policy(max_num_batched_tokens=32, enable_chunked_prefill=False)
    world = World(policy)
    assert world.scheduler.intake.max_input_length == 32
    world.add("a", prompt(20), max_tokens=3)
    world.add("b", prompt(20, 7), max_tokens=3)
    world.run()
    world.assert_outputs()
    assert world.scheduler.counters.num_chunked_prefills == 0


def test_without_chunking_no_prompt_is_too_long_for_a_piece() -> None:
    world = World(Policy(max_num_batched_tokens=32, enable_chunked_prefill=False, long_prefill_token_threshold=8))
    world.add("a", prompt(20), max_tokens=3)
    world.run()
    world.assert_outputs("a")
    assert world.scheduler.counters.num_chunked_prefills == 0


def test_without_chunking_a_sequence_that_has_outgrown_a_step_is_computed_again() -> None:
    world = World(Policy(max_num_batched_tokens=32, enable_chunked_prefill=False))
    world.add("long", prompt(20), max_tokens=40)
    while len(world.outputs.get(("long", 0), ())) < 20:
        world.step()
    world.lose("w0")
    world.join("w1")
    world.add("behind", prompt(3, 7), max_tokens=4)
    world.run()
    world.assert_outputs("long", "behind")
    world.assert_idle()


def test_a_planner_lives_as_long_as_its_replica_and_keeps_nothing_of_a_plan() -> None:
    world = World(num_blocks=16, workers=2)
    planners = dict(world.scheduler._batchers)
    for index in range(6):
        world.add(f"r{index}", prompt(5 + index, index), max_tokens=20)
        world.step()
        for name, planner in planners.items():
            assert world.scheduler._batchers[name] is planner
            assert not planner.builder.step.sequences and not planner.builder.copies
            assert planner.builder.budget == world.scheduler.policy.max_num_batched_tokens
    world.lose("w1")
    world.join("w1")
    assert world.scheduler._batchers["w0"] is planners["w0"]
    assert world.scheduler._batchers["w1"] is not planners["w1"], "another life, another planner"
    world.run()
    world.assert_outputs()


def test_the_same_events_give_the_same_plans() -> None:
    def run() -> list[object]:
        world = World(num_blocks=16, workers=2)
        for index in range(12):
            world.add(f"r{index}", prompt(5 + index, index), max_tokens=20, n=1 + index % 2)
            world.step()
        world.run()
        return list(world.trace)

    assert run() == run()
