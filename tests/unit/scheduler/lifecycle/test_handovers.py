"""Which requests go over to another worker, when, and what is computed again."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.scheduler.lifecycle.handovers import MAX_AT_ONCE, MAX_AWAITED, Arrival, Handover
from services.scheduler.state.policy import Policy
from shared.messages import (
    AddRequest,
    FetchBlocks,
    Leaving,
    MayLeave,
    RequestHeader,
    ServeBlocks,
    StoreCapacity,
    WorkerCapacity,
    WorkerRole,
)
from shared.packing import pack_tokens
from shared.requests.beam import Beam
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.unit.scheduler.actor.shell import Shell
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.moving_world import SPACES, MovingWorld

SIZE = 8
PROMPT = [(7 * place) % 50 for place in range(60)]


def world(*roles: WorkerRole, **more: Any) -> MovingWorld:
    found = MovingWorld(Policy(max_num_batched_tokens=32), workers=0, **more)
    for index, role in enumerate(roles):
        found.join(f"w{index}", capacity(block_space=SPACES[SIZE], role=role))
    return found


class Lucky(random.Random):
    """No move is lost, and none comes in parts."""

    def random(self) -> float:
        return 0.5


def step(found: MovingWorld) -> None:
    """One of each worker, and all that moves arrives."""
    for name in list(found.workers):
        found.plan(name)
        while found.work(name) or found.hear(name):
            pass
        while (carrier := found.workers[name].carrier).given or carrier.wanted:
            found.carry(name, Lucky())
            while found.work(name) or found.hear(name):
                pass
        found.send_orders()
        while found.work(name) or found.hear(name):
            pass
    found.let_leave()


def fetches(found: MovingWorld, name: str) -> list[FetchBlocks]:
    """Those on their way to a worker; there are some."""
    orders = [move.order for move in found.scheduler.replicas[name].moves.open.values()]
    wanted = [order for order in orders if isinstance(order, FetchBlocks)]
    assert wanted, "nothing is fetched"
    return wanted


def scheduled(found: MovingWorld, epoch: int) -> int:
    return sum(sum(plan.num_scheduled_tokens) for plan in found.trace if plan.epoch == epoch)


@pytest.mark.parametrize("num_steps", range(12, 12 + SIZE))  # from any place within a block
def test_a_worker_that_leaves_goes_once_its_requests_are_elsewhere(num_steps: int) -> None:
    w = world(WorkerRole.BOTH)
    w.add("r", PROMPT, max_tokens=60)
    w.add("s", PROMPT[::-1], max_tokens=60, n=2)
    for _ in range(num_steps):
        step(w)
    assert len(w.scheduler.replicas["w0"].running) == 3
    w.join("w1", capacity(block_space=SPACES[SIZE]))
    w.leave("w0")
    for _ in range(30):
        if "w0" not in w.workers:
            break
        step(w)
    assert list(w.workers) == ["w1"], "it cannot leave"
    assert w.scheduler.handovers.num_handed_over == 3 and w.scheduler.moves.num_fetched_blocks > 10
    admitted = [(plan, one.row) for plan in w.trace if plan.epoch == 2 for one in plan.admitted]
    again = [plan.num_scheduled_tokens[plan.rows.index(row)] for plan, row in admitted]
    assert len(again) == 3 and max(again) <= SIZE // 2, "they go over when little is to be computed again"
    w.settle()
    w.assert_outputs("r", "s")


def test_one_whose_blocks_never_come_soon_goes_over_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that does not go on has as much behind its last full block for ever."""
    monkeypatch.setattr("services.scheduler.lifecycle.handovers.MAX_LOOKS", 3)
    w = world(WorkerRole.BOTH)
    w.add("r", PROMPT[:46], max_tokens=60)
    while w.scheduler.requests["r"].sequences[0].num_tokens < 46 + SIZE + 1:
        step(w)
    w.join("w1", capacity(block_space=SPACES[SIZE]))
    w.leave("w0")
    sequence = w.scheduler.requests["r"].sequences[0]
    for _ in range(30):
        if sequence.worker == "w1":
            break
        w.scheduler.handovers.advance(w.scheduler.replicas["w1"])  # and w0 computes nothing
        while (carrier := w.workers["w1"].carrier).given or carrier.wanted:
            w.carry("w1", Lucky())
        w.send_orders()
        for name in w.workers:
            while w.work(name) or w.hear(name):
                pass
    assert sequence.worker == "w1"


def test_one_whose_blocks_come_late_again_and_again_goes_over_behind_the_third() -> None:
    """Its tokens come faster than its blocks are fetched, so there is never little behind them."""
    w = world(WorkerRole.BOTH)
    w.add("r", PROMPT[:46], max_tokens=60)
    sequence = w.scheduler.requests["r"].sequences[0]
    while sequence.num_tokens < 46 + SIZE:
        step(w)
    w.join("w1", capacity(block_space=SPACES[SIZE]))
    w.leave("w0")
    begin = sequence.num_tokens

    def deliver() -> None:
        for name in w.workers:
            while w.work(name) or w.hear(name):
                pass

    while sequence.worker == "w0" and sequence.num_tokens < begin + 6 * SIZE:
        w.plan("w0")
        deliver()
        w.send_orders()
        deliver()
        if sequence.num_tokens % SIZE == SIZE - 3 or sequence.num_tokens < begin + 2:
            while (carrier := w.workers["w1"].carrier).given or carrier.wanted:
                w.carry("w1", Lucky())
            deliver()
    assert sequence.worker == "w1" and sequence.num_tokens > begin + SIZE
    w.settle()
    w.assert_outputs("r")


def test_some_requests_at_a_time_are_on_their_way_from_a_worker_that_leaves() -> None:
    w = world()
    w.join("w0", capacity(200, block_space=SPACES[SIZE]))
    for index in range(MAX_AT_ONCE + 3):
        w.add(f"r{index}", [index, *PROMPT[:40]], max_tokens=60)
    for _ in range(30):
        step(w)
    assert len(w.scheduler.replicas["w0"].running) == MAX_AT_ONCE + 3
    w.join("w1", capacity(200, block_space=SPACES[SIZE]))
    w.leave("w0")
    target = w.scheduler.replicas["w1"].moves
    for _ in range(3):
        w.plan("w1")
        assert len(target.open) == MAX_AT_ONCE, "the others wait for these"
    while "w0" in w.workers:
        step(w)
    assert w.scheduler.handovers.num_handed_over == MAX_AT_ONCE + 3
    w.settle()
    w.assert_outputs()


def test_few_tokens_are_computed_again_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose blocks are full at the same time do not go over at the same time."""
    monkeypatch.setattr("services.scheduler.lifecycle.handovers.FREE_TOKENS", 4)
    w = MovingWorld(Policy(max_num_batched_tokens=512), workers=0)
    w.join("w0", capacity(200, block_space=SPACES[SIZE]))
    for index in range(5):
        w.add(f"r{index}", [index, *PROMPT[:40]], max_tokens=90)
    for _ in range(20):
        step(w)
    w.join("w1", capacity(200, block_space=SPACES[SIZE]))
    w.leave("w0")
    for _ in range(60):
        if "w0" not in w.workers:
            break
        step(w)
    plans = [plan for plan in w.trace if plan.epoch == 2 and plan.admitted]
    again = [[plan.num_scheduled_tokens[plan.rows.index(one.row)] for one in plan.admitted] for plan in plans]
    assert sum(len(tokens) for tokens in again) == 5 and len(again) > 2
    assert all(len(tokens) == 1 or sum(tokens) <= 5 for tokens in again), "4, or as many as there are rows"
    w.settle()
    w.assert_outputs()


def test_no_step_is_sent_ahead_where_streams_go_over() -> None:
    w = world(WorkerRole.BOTH, WorkerRole.BOTH)
    w.add("r", PROMPT, max_tokens=60)
    w.add("s", PROMPT[::-1], max_tokens=60)
    for _ in range(10):
        step(w)
    replicas = w.scheduler.replicas
    assert [len(replica.running) for replica in replicas.values()] == [1, 1]

    def num_ahead(name: str) -> int:
        while replicas[name].in_flight:
            while w.work(name) or w.hear(name):
                pass
        w.plan(name)
        w.plan(name)
        return len(replicas[name].in_flight)

    assert (num_ahead("w0"), num_ahead("w1")) == (2, 2)
    w.leave("w0")
    w.plan("w0")
    assert all(order.is_unhurried for order in fetches(w, "w1")), "a stream goes on meanwhile"
    assert num_ahead("w1") == 1, "it would be one more for which they wait"
    assert num_ahead("w0") == 2, "its tokens come while the other worker ends its step"
    for _ in range(40):
        step(w)
    assert list(w.workers) == ["w1"] and num_ahead("w1") == 2
    w.settle()
    w.assert_outputs("r", "s")


@pytest.mark.parametrize(("tail", "is_near"), [(None, True), (9, False), (12, False), (13, True), (20, True)])
def test_steps_are_sent_ahead_while_the_block_of_one_that_goes_over_is_far_from_full(
    tail: int | None, is_near: bool
) -> None:
    """None: its blocks are on their way."""
    w = world(WorkerRole.BOTH)
    w.add("r", PROMPT, max_tokens=60)
    w.join("w1", capacity(block_size=16, block_space=SPACES[16]))
    w.leave("w0")
    (sequence,) = (request := w.scheduler.requests["r"]).sequences
    handovers, replicas = w.scheduler.handovers, w.scheduler.replicas
    handovers._open[request] = Handover("w0", "w1", tails={} if tail is None else {sequence: tail})
    assert handovers.awaits_result(replicas["w1"]) is is_near and not handovers.awaits_result(replicas["w0"])
    w.settle()
    w.assert_outputs("r")


def test_a_worker_without_room_for_what_comes_goes_on_at_its_own_speed() -> None:
    w = world(WorkerRole.BOTH)
    w.add("r", PROMPT)
    (sequence,), handovers = w.scheduler.requests["r"].sequences, w.scheduler.handovers
    (replica,) = w.scheduler.replicas.values()
    handovers._arriving = {sequence: Arrival(3, num_steps=7)}
    replica.num_steps = 7 + MAX_AWAITED - 1
    assert not handovers.awaits_result(replica), "no worker leaves"
    w.scheduler.moves.leaving.add("another")
    assert handovers.awaits_result(replica)
    replica.num_steps += 1
    assert not handovers.awaits_result(replica)


def assert_goes_over_at_once(w: MovingWorld, successor: WorkerCapacity) -> None:
    """A request of w0, none of whose blocks are fetched."""
    w.add("r", PROMPT, max_tokens=20)
    for _ in range(5):
        step(w)
    w.join("w1", successor)
    w.leave("w0")
    for _ in range(4):
        step(w)
    assert list(w.workers) == ["w1"] and w.scheduler.moves.num_fetched_blocks == 0
    w.settle()
    w.assert_outputs("r")


def test_without_names_for_blocks_requests_go_over_at_once_and_are_computed_again() -> None:
    w = MovingWorld(Policy(max_num_batched_tokens=64, enable_prefix_caching=False), workers=0)
    w.join("w0", capacity(block_space=SPACES[SIZE]))
    assert_goes_over_at_once(w, capacity(block_space=SPACES[SIZE]))


def test_to_a_worker_that_cannot_fetch_their_blocks_requests_go_over_at_once() -> None:
    assert_goes_over_at_once(world(WorkerRole.BOTH), capacity())


def test_siblings_go_over_together_once_their_prompt_is_computed() -> None:
    w = world(WorkerRole.PREFILL, WorkerRole.DECODE)
    w.add("r", PROMPT, max_tokens=12, n=2)
    for _ in range(60):
        if not w.scheduler.requests:
            break
        step(w)
    w.assert_outputs("r")
    assert w.scheduler.handovers.num_handed_over == 2
    assert scheduled(w, 1) == len(PROMPT) // SIZE * SIZE, "once"
    w.settle()


def test_a_worker_without_a_successor_may_leave_at_once() -> None:
    w = world(WorkerRole.BOTH)
    w.add("r", PROMPT)
    w.plan("w0")
    w.leave("w0")
    assert w.scheduler.handovers.take_released() == ["w0"] and not w.scheduler.handovers.take_released()


def test_prompts_are_computed_by_one_worker_and_go_on_at_another() -> None:
    w = world(WorkerRole.PREFILL, WorkerRole.DECODE)
    w.add("long", PROMPT, max_tokens=20)
    w.add("short", PROMPT[40:], max_tokens=20)
    assert [w.scheduler.requests[name].sequences[0].worker for name in ("long", "short")] == ["w0", "w1"]
    while w.scheduler.requests:
        step(w)
    w.assert_outputs("long", "short")
    assert scheduled(w, 1) == len(PROMPT) // SIZE * SIZE, "its full blocks, and no token that is sampled from"
    assert w.scheduler.moves.num_fetched_blocks == len(PROMPT) // SIZE
    w.settle()


def test_the_rest_of_a_prompt_is_fetched_too_where_its_first_part_is_still_on_its_way() -> None:
    """Though the worker where it goes on would compute that sooner, the other one was to do it."""
    w = world(WorkerRole.PREFILL, WorkerRole.DECODE)
    w.add("r", PROMPT, max_tokens=4)
    (sequence,) = w.scheduler.requests["r"].sequences
    moves = w.scheduler.replicas["w1"].moves
    while sequence.worker == "w0":  # nothing is carried meanwhile
        w.plan("w0")
        while w.work("w0") or w.hear("w0"):
            pass
        moves.speed.computed(64, 1e-6)
        w.scheduler.moves.stores.measured("w0", 1 << 20, 1.0, w.now)
    assert not any(order.is_unhurried for order in fetches(w, "w1")), "a client waits for it"
    while w.scheduler.requests:
        step(w)
    w.assert_outputs("r")
    assert scheduled(w, 2) == len(PROMPT) % SIZE + 3, (
        "what is behind its full blocks, and a token for each but the last"
    )


def test_a_prompt_that_another_has_brought_goes_on_elsewhere_without_being_computed() -> None:
    """It waits for the same blocks, and never has a row at the worker for prefills."""
    w = world(WorkerRole.PREFILL, WorkerRole.DECODE)
    for name in ("first", "second"):
        w.add(name, PROMPT, max_tokens=12)
        assert w.scheduler.requests[name].sequences[0].worker == "w0"
    for _ in range(60):
        if not w.scheduler.requests:
            break
        step(w)
    w.assert_outputs("first", "second")
    assert scheduled(w, 1) == len(PROMPT) // SIZE * SIZE, "once"
    assert w.scheduler.handovers.num_handed_over == 2
    w.settle()


@pytest.mark.parametrize(
    ("length", "is_apart"), [(4 * SIZE, False), (4 * SIZE + 1, True), (5 * SIZE, True), (3 * SIZE + 7, False)]
)
def test_a_prompt_goes_to_a_worker_for_prefills_from_four_full_blocks_on(length: int, is_apart: bool) -> None:
    """Behind them there is a token more, from which the next one is sampled elsewhere."""
    w = world(WorkerRole.PREFILL, WorkerRole.DECODE)
    w.add("r", PROMPT[:length], max_tokens=4)
    assert w.scheduler.requests["r"].sequences[0].worker == ("w0" if is_apart else "w1")
    while w.scheduler.requests:
        step(w)
    w.assert_outputs("r")


def test_blocks_that_the_other_worker_has_are_not_computed_by_one_for_prefills() -> None:
    w = world(WorkerRole.PREFILL, WorkerRole.DECODE)
    w.add("first", PROMPT[: 2 * SIZE + 1], max_tokens=4)
    w.run()
    w.add("r", PROMPT[: 5 * SIZE + 1], max_tokens=4)
    assert w.scheduler.requests["r"].sequences[0].worker == "w1", "three of its five blocks are left to compute"
    w.run()
    w.assert_outputs()


@pytest.mark.parametrize(
    ("here", "there"), [(b"", SPACES[SIZE]), (SPACES[SIZE], b""), (SPACES[SIZE], SPACES[16]), (b"", b"")]
)
def test_a_prompt_is_computed_where_it_goes_on_unless_its_blocks_can_be_moved_there(here: bytes, there: bytes) -> None:
    w = world()
    w.join("w0", capacity(block_space=here, role=WorkerRole.PREFILL))
    w.join("w1", capacity(block_space=there, role=WorkerRole.DECODE))
    w.add("r", PROMPT, max_tokens=4)
    assert w.scheduler.requests["r"].sequences[0].worker == "w1"
    w.run()
    w.assert_outputs("r")


def test_a_search_begins_where_it_goes_on() -> None:
    """Its beams begin again behind each other all the time: no other worker finds what was computed of them."""
    w = world(WorkerRole.PREFILL, WorkerRole.DECODE)
    params = SamplingParams(beam=Beam(2), max_tokens=4).resolved(GenerationDefaults(), max_tokens=4)
    w.scheduler.add(AddRequest(RequestHeader("r", "g0"), params, pack_tokens(PROMPT)), now=0.0)
    assert w.scheduler.requests["r"].sequences[0].worker == "w1"
    w.scheduler.abort("r")


def test_where_all_are_for_prefills_one_does_everything() -> None:
    w = world(WorkerRole.PREFILL, WorkerRole.PREFILL)
    w.add("r", PROMPT, max_tokens=4)
    assert not any(replica.prefills for replica in w.scheduler.replicas.values())
    while w.scheduler.requests:
        step(w)
    w.assert_outputs("r")
    assert w.scheduler.handovers.num_handed_over == 0


@pytest.mark.parametrize("victim", ["w0", "w1"])
def test_the_other_does_the_work_of_one_that_dies(victim: str) -> None:
    w = world(WorkerRole.PREFILL, WorkerRole.DECODE)
    w.add("long", PROMPT, max_tokens=20)
    step(w)
    w.lose(victim)
    while w.scheduler.requests:
        step(w)
    w.assert_outputs("long")
    assert not any(replica.prefills for replica in w.scheduler.replicas.values())


def test_what_another_worker_has_is_cheaper_than_what_is_to_compute() -> None:
    """A worker without the prefix is chosen where fetching takes a tenth of computing, and the one with it is busy."""
    w = world(WorkerRole.BOTH, WorkerRole.BOTH)
    w.add("r", PROMPT, max_tokens=2)
    while w.scheduler.requests:
        step(w)
    (has,) = [name for name, replica in w.scheduler.replicas.items() if replica.pool.names]
    (lacks,) = w.workers.keys() - {has}
    moves = w.scheduler.replicas[lacks].moves
    moves.speed.computed(64, 1.0)
    w.add("a", PROMPT, max_tokens=2)
    w.scheduler.moves.stores.measured(has, 70 << 20, 0.1, w.now)
    placed = w.scheduler._assignment.router._saved(
        w.scheduler.requests["a"].sequences[0], [w.scheduler.replicas[name] for name in (has, lacks)]
    )
    seconds = moves.seconds_from(has, 7)
    assert placed == [0.0, pytest.approx(10 * 7 * (1 - seconds / (7 * SIZE / 64)))] and seconds < 0.1
    w.abort("a")
    w.scheduler.replicas[has].waiting.num_tokens += 4 * SIZE  # less than the prompt, and more than fetching it costs
    w.add("b", PROMPT, max_tokens=2)
    assert w.scheduler.requests["b"].sequences[0].worker == lacks
    w.scheduler.replicas[has].waiting.num_tokens -= 4 * SIZE
    w.settle()


def test_the_shell_answers_a_worker_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(monkeypatch)
    shell.hear(shell.hello("w0", store=StoreCapacity("unix:/run/w0.blocks", b"s", 0)))
    assert shell.actor.core.moves.peers.serving == {"w0"}
    shell.hear(Leaving("w0", 7))
    assert not shell.taken(MayLeave), "that was another life"
    shell.hear(Leaving("w0", 1))
    assert shell.taken(MayLeave) == [MayLeave("w0", 1)] and not shell.taken(ServeBlocks)
    shell.hear(Leaving("w0", 1))
    assert shell.taken(MayLeave), "the first answer may have been lost"


def test_another_target_is_asked_for_what_it_has_itself() -> None:
    w = world(WorkerRole.BOTH)
    w.add("r", PROMPT, max_tokens=40)
    for _ in range(8):
        step(w)
    for name in ("w1", "w2"):
        w.join(name, capacity(block_space=SPACES[SIZE]))
    w.leave("w0")
    w.plan("w0")
    ((_, one),) = w.scheduler.handovers._open.items()
    ((sequence, _),) = one.num_there.items()
    one.num_there[sequence] = 5
    w.lose(one.target)
    w.plan("w0")
    assert one.target in w.workers and one.num_there[sequence] == 0
    w.settle()
    w.assert_outputs("r")


def test_of_a_prompt_that_is_cached_as_a_whole_a_token_is_left_to_compute() -> None:
    w = world(WorkerRole.PREFILL, WorkerRole.DECODE)
    w.add("first", PROMPT[: 5 * SIZE + 1], max_tokens=2)
    w.settle()
    w.lose("w1")
    w.add("second", PROMPT[: 4 * SIZE], max_tokens=2)
    (sequence,) = w.scheduler.requests["second"].sequences
    source = w.scheduler.replicas[sequence.worker]
    assert sequence.worker == "w0" and source.pool.num_cached_of(sequence.hash_blocks(SIZE)) == 4
    assert w.scheduler.handovers._names(sequence, source) == sequence.hash_blocks(SIZE)[:3]
    w.settle()
    w.assert_outputs("first", "second")
