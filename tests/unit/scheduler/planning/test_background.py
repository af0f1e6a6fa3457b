"""Background requests: they are computed where no other request is, and give way to every other."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.scheduler.lifecycle.routing import least_loaded, prefix_aware
from services.scheduler.load import load_of
from services.scheduler.state.policy import Policy
from services.scheduler.state.sequence import MAX_PREEMPTIONS, Sequence
from services.scheduler.telemetry.stalls import StallWatch
from shared.errors import RejectCode
from shared.metrics.histogram import STEP_TOKENS, Histogram
from shared.requests.beam import Beam
from tests.unit.scheduler.worlds.beam_world import BeamWorld
from tests.unit.scheduler.worlds.fake_draft import FakeDraft
from tests.unit.scheduler.worlds.world import World


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 50 for i in range(length)]


def rest(world: World, request_id: str, length: int = 6, **more: Any) -> None:
    world.add(request_id, prompt(length, len(request_id)), is_background=True, **{"max_tokens": 20, **more})


def only(world: World, request_id: str) -> Sequence:
    (sequence,) = world.scheduler.requests[request_id].sequences
    return sequence


def num_output(world: World, request_id: str) -> int:
    return len(world.outputs.get((request_id, 0), []))


def test_background_waits_while_another_runs_keeps_what_it_has_and_goes_on_behind_it() -> None:
    world = World()
    rest(world, "batch")
    for _ in range(6):
        world.step()
    had, blocks = num_output(world, "batch"), list(only(world, "batch").block_ids)
    assert 0 < had < 20
    world.add("live", prompt(4, 9), max_tokens=12)
    while ("live", 0) not in world.finished:
        world.step()
    assert num_output(world, "batch") <= had + 1, "at most the step that was in flight"
    assert only(world, "batch").block_ids[: len(blocks)] == blocks, "it keeps its row and its blocks"
    world.run()
    world.assert_outputs()
    world.assert_idle()
    assert world.scheduler.counters.num_preemptions == 0, "nothing lacked a row or a block"


def test_background_is_not_started_while_another_waits_or_runs() -> None:
    world = World(max_num_seqs=1)
    for index in range(3):
        rest(world, f"batch{index}", max_tokens=3)
    world.add("live0", prompt(4, 9), max_tokens=4)
    world.add("live1", prompt(4, 20), max_tokens=4)
    order: list[str] = []
    while world.step():
        order += [name for name, _ in world.finished if name not in order]
    assert order == ["live0", "live1", "batch0", "batch1", "batch2"]
    world.assert_outputs()


def test_a_waiting_request_takes_the_row_of_a_resting_one() -> None:
    world = World(max_num_seqs=2)
    rest(world, "batch0")
    rest(world, "batch1", 7)
    world.step()
    world.add("live", prompt(4, 9), max_tokens=4)
    plan = world.plan("w0")
    assert plan is not None and [admitted.request_id for admitted in plan.admitted] == ["live"]
    assert world.scheduler.replicas["w0"].num_background == 1, "one row was wanted, so one gave way"
    world.run()
    world.assert_outputs()
    world.assert_idle()


def test_resting_sequences_give_all_their_blocks_where_others_need_them_even_protected_ones() -> None:
    world = World(num_blocks=12, block_size=4, max_model_len=48)
    for index in range(3):
        rest(world, f"batch{index}", 10)
    for _ in range(3):
        world.step()
    for index in range(3):
        only(world, f"batch{index}").num_preemptions = MAX_PREEMPTIONS
    world.add("live", prompt(40, 9), max_tokens=8)
    while ("live", 0) not in world.finished:
        assert world.step(), "what rests holds what the other waits for"
    world.run()
    world.assert_outputs()
    world.assert_idle()


def test_a_growing_request_takes_blocks_of_resting_ones_before_it_preempts_its_like() -> None:
    world = World(num_blocks=16, block_size=4, max_model_len=48)
    rest(world, "batch", 20)
    for _ in range(3):
        world.step()
    for index in range(2):
        world.add(f"live{index}", prompt(8, 9 + index), max_tokens=20)
    while len(world.finished) < 2:
        assert world.step()
    assert world.scheduler.counters.num_preemptions == 1, "the resting one alone"
    world.run()
    world.assert_outputs()


def test_tenants_take_no_rows_from_each_other_while_others_rest() -> None:
    world = World(max_num_seqs=4)
    for index in range(4):
        rest(world, f"batch{index}", tenant="large")
    world.step()
    world.add("large0", prompt(4, 9), tenant="large", max_tokens=6)
    world.add("large1", prompt(4, 19), tenant="large", max_tokens=6)
    world.step()
    world.add("small", prompt(4, 29), tenant="small", max_tokens=6)
    world.run()
    assert world.scheduler.requests == {}
    world.assert_outputs()
    assert world.scheduler.counters.num_preemptions == 3, "of the background"


def test_background_is_no_debt_of_its_tenant() -> None:
    world = World(max_num_seqs=1)
    rest(world, "batch", tenant="large")
    world.run()
    world.add("first", prompt(4, 5), max_tokens=8, tenant="small")
    world.step()
    shares = world.scheduler.shares
    assert shares.served("large") == 0.0
    world.add("second", prompt(4, 7), max_tokens=2, tenant="small")
    world.add("third", prompt(4, 9), max_tokens=2, tenant="large")
    order: list[str] = []
    while world.step():
        order += [name for name, _ in world.finished if name not in order]
    assert order.index("third") < order.index("second"), "it had less of what is shared"


def test_among_background_requests_tenants_share() -> None:
    world = World(max_num_seqs=1)
    for index in range(3):
        rest(world, f"large{index}", tenant="large", max_tokens=4)
    rest(world, "small", tenant="small", max_tokens=4)
    order: list[str] = []
    while world.step():
        order += [name for name, _ in world.finished if name not in order]
    assert order.index("small") == 1


def test_a_step_of_background_alone_is_short_and_has_no_second_behind_it() -> None:
    world = World(Policy(max_num_batched_tokens=32, background_step_tokens=5), max_model_len=128)
    rest(world, "batch", 60)
    plan = world.plan("w0")
    assert plan is not None and sum(plan.num_scheduled_tokens) == 5
    assert world.plan("w0") is None, "a request that arrives would have to wait for it"
    world.add("live", prompt(30, 3))
    plan = world.plan("w0")
    assert plan is not None and sum(plan.num_scheduled_tokens) == 30, "beside it, at once, and as long as ever"
    world.run()
    world.assert_outputs()


def test_without_chunks_a_prompt_of_the_background_is_computed_whole() -> None:
    policy = Policy(max_num_batched_tokens=64, enable_chunked_prefill=False, background_step_tokens=5)
    world = World(policy, max_model_len=128)
    rest(world, "batch", 50)
    world.run()
    world.assert_outputs()


@pytest.mark.parametrize("is_background", [False, True])
def test_each_kind_has_a_queue_limit_of_its_own(is_background: bool) -> None:
    world = World(Policy(max_num_queued_reqs=2, max_num_queued_background_reqs=3))
    for index in range(2 if is_background else 3):
        world.add(f"other{index}", prompt(4, index), is_background=not is_background)
    limit = 3 if is_background else 2
    for index in range(limit + 1):
        world.add(f"own{index}", prompt(4, index), is_background=is_background)
    assert world.rejected == {f"own{limit}": RejectCode.RESOURCE_EXHAUSTED}


def test_load_reports_count_it_apart() -> None:
    world = World(max_num_seqs=2)
    for index in range(3):
        rest(world, f"batch{index}", 20)
    world.step(), world.step()
    load = load_of(world.scheduler, "q", Histogram(STEP_TOKENS))
    assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (0, 0, 0.0)
    assert (load.num_background_running, load.num_background_waiting) == (2, 1)
    world.add("live", prompt(4, 9), max_tokens=4)
    world.step()
    load = load_of(world.scheduler, "q", Histogram(STEP_TOKENS))
    assert (load.num_running, load.num_background_running, load.num_background_waiting) == (1, 1, 2)
    assert 0 < load.kv_cache_usage < 0.2


def test_a_worker_with_background_work_is_as_good_as_one_without() -> None:
    world = World(workers=2, max_num_seqs=2, num_blocks=64, block_size=8)
    busy, idle = (world.scheduler.replicas[name] for name in ("w0", "w1"))
    world.scheduler.retire_worker("w1")
    for index in range(4):
        rest(world, f"batch{index}", 24 + index)
    world.plan("w0"), world.answer("w0")
    world.add("live", prompt(4, 9), max_tokens=4)
    world.add("more", prompt(4, 9), max_tokens=4, is_background=True)
    for score in (least_loaded, prefix_aware):
        empty = score(only(world, "live"), idle)
        mine = score(only(world, "live"), busy)
        assert mine - empty == pytest.approx(1.0 if score is least_loaded else 10 * 4 / 8), "its own part, as it waits"
        assert score(only(world, "more"), busy) > mine, "what is in the background meets its like"


def test_rest_is_no_stall() -> None:
    world, watch = World(), StallWatch(10.0)
    rest(world, "batch")
    world.step()
    world.add("live", prompt(4, 9), max_tokens=30)
    for now in range(0, 200, 5):
        world.step()
        assert watch.look(world.scheduler.replicas.values(), (), float(now)) == []
        if not world.scheduler.requests:
            break


def test_a_quarantined_request_does_not_wait_for_a_resting_one() -> None:
    world = World()
    rest(world, "batch")
    for _ in range(3):
        world.step()
    suspect = world.scheduler.requests["batch"]
    suspect.num_worker_deaths, suspect.num_tokens_at_death = 2, suspect.num_output_tokens
    world.add("live", prompt(4, 9), max_tokens=4)
    request = world.scheduler.requests["live"]
    request.num_worker_deaths, request.num_tokens_at_death = 2, 0
    while ("live", 0) not in world.finished:
        assert world.step()
    world.run()
    world.assert_outputs()


def test_drafts_are_not_waited_for_in_the_background() -> None:
    world = World(Policy(max_num_batched_tokens=32, num_draft_tokens=3))
    world.join_draft("d0", FakeDraft(7, skill=0.9, num_rows=8))
    rest(world, "batch", max_tokens=30)
    for _ in range(8):
        world.plan("w0")
        world.answer("w0")
        assert world.scheduler.wake_time is None, "a request that arrives would wait as long"
        world.propose("d0")
    world.add("live", prompt(4, 9), max_tokens=12)
    world.run()
    world.assert_outputs()
    assert world.scheduler.counters.num_accepted_tokens > 0


@pytest.mark.parametrize("seed", range(6))
def test_beams_rest_too_and_come_to_what_they_come_to_alone(seed: int) -> None:
    r = random.Random(seed)
    world = BeamWorld(
        Policy(max_num_batched_tokens=24), num_blocks=r.choice([24, 60]), block_size=4, max_num_seqs=8, max_model_len=64
    )
    for index in range(3):
        world.add_beam(
            f"batch{index}", prompt(r.randrange(2, 14), index), Beam(3), n=2, max_tokens=8, is_background=True
        )
    for index in range(6):
        for _ in range(r.randrange(7)):
            world.step()
        if r.random() < 0.5:
            world.add_beam(f"live{index}", prompt(r.randrange(2, 9), index), Beam(2), max_tokens=5)
        else:
            world.add(f"live{index}", prompt(r.randrange(2, 20), index), max_tokens=6)
    world.run()
    world.assert_outputs()
    world.assert_idle()


def test_tokens_that_wait_count_for_their_kind() -> None:
    world = World(max_num_seqs=1)
    world.add("running", prompt(4), max_tokens=30)
    world.step()
    world.add("live", prompt(9))
    rest(world, "batch", 13)
    queued = world.scheduler._assignment.queued
    assert queued(is_background=False) == (1, 9) and queued(is_background=True) == (1, 13)


def test_a_waiting_request_takes_a_free_row_beside_as_many_resting_ones() -> None:
    world = World(max_num_seqs=4)
    rest(world, "batch0")
    rest(world, "batch1", 7)
    world.step()
    for index in range(2):
        world.add(f"live{index}", prompt(4, 9 + index), max_tokens=4)
        plan = world.plan("w0")
        assert plan is not None and [admitted.request_id for admitted in plan.admitted] == [f"live{index}"]
        world.answer("w0")
    assert world.scheduler.replicas["w0"].num_background == 2, "no row was taken"
    world.run()
    world.assert_outputs()


def test_tenants_share_nothing_where_only_background_waits() -> None:
    world = World(max_num_seqs=3)
    for name in "ab":
        world.add(name, prompt(4, ord(name) % 50), tenant=name, max_tokens=8)
    rest(world, "batch0")
    world.step()
    rest(world, "batch1")
    replica = world.scheduler.replicas["w0"]
    assert replica.is_resting and len(replica.waiting) == replica.waiting.num_background == 2
    shared = [replica.is_shared]
    world.add("c", prompt(4, 9), tenant="a", max_tokens=4)
    assert [*shared, replica.is_shared] == [False, True]
    world.run()
    world.assert_outputs()
