"""Drafts change no token, are used as far as they agree, waited for as long as they are worth, and done without."""

from __future__ import annotations

import os
import random
from typing import Any

import msgspec
import pytest

from services.scheduler.speculation.speculation import Speculation
from services.scheduler.state.policy import Policy
from shared.errors import ProtocolError
from shared.messages import DraftDistribution, DraftProposals, DraftUpdate, StepPlan, StepResult
from shared.requests.grammar import Grammar, GrammarKind
from tests.unit.scheduler.worlds.fake_draft import FakeDraft
from tests.unit.scheduler.worlds.fake_worker import drafts_of
from tests.unit.scheduler.worlds.world import World

EVENTS = int(os.environ.get("PAGEANT_TEST_EVENTS", "100000")) // 4
ENOUGH = 24_000  # to see everything


def speculating(
    num_draft_tokens: int = 3, *, skill: float = 0.8, forgets: float = 0.0, num_rows: int = 16, **limits: Any
) -> World:
    world = World(Policy(max_num_batched_tokens=64, num_draft_tokens=num_draft_tokens), **limits)
    world.join_draft("d", FakeDraft(skill=skill, forgets=forgets, num_rows=num_rows))
    return world


def verified(world: World) -> list[list[int]]:
    return [drafts for plan in world.trace for drafts in drafts_of(plan) if drafts]


def test_drafts_are_verified_and_the_output_is_the_same() -> None:
    world = speculating()
    for index in range(6):
        world.add(f"r{index}", [index, 7, 9], max_tokens=30, seed=index)
    world.run()
    world.assert_outputs(*(f"r{index}" for index in range(6)))
    world.assert_idle()
    counters = world.scheduler.counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens == sum(map(len, verified(world)))
    assert counters.num_accepted_per_position[0] >= counters.num_accepted_per_position[-1] > 0
    assert sum(counters.num_accepted_per_position) == counters.num_accepted_tokens


def test_fewer_steps_with_a_good_draft() -> None:
    plain, drafted = World(), speculating(skill=1.0)
    for world in (plain, drafted):
        world.add("r", [1, 2, 3], max_tokens=41)
        world.run()
        world.assert_outputs("r")
    assert len(plain.trace) == 41
    assert len(drafted.trace) == 11  # the prompt, then ten steps of three drafts and one more


def test_never_more_drafts_than_tokens_that_can_still_come() -> None:
    for max_tokens in range(1, 9):
        world = speculating(8, skill=1.0)
        world.add("r", [1, 2, 3], max_tokens=max_tokens)
        world.run()
        world.assert_outputs("r")
        assert sum(map(len, verified(world))) == max(0, max_tokens - 2)


def test_no_draft_is_awaited_for_sequences_that_have_ended() -> None:
    """Else the scheduler would be woken for it again and again."""
    world = speculating()
    world.add("r", [1, 2, 3], max_tokens=20)
    assert world.plan("w0") is not None
    world.answer("w0")
    assert world.plan("w0") is None
    awaited = world.scheduler.wake_time
    world.abort("r")
    assert world.plan("w0") is None
    assert (awaited is not None, world.scheduler.wake_time) == (True, None)
    world.add("next", [1, 2, 4], max_tokens=20)
    world.run()
    world.assert_outputs("next")


def test_a_request_can_do_without() -> None:
    world = speculating(skill=1.0)
    world.add("with", [1, 2, 3], max_tokens=20)
    world.add("without", [4, 5], max_tokens=20, speculate=False)
    world.run()
    world.assert_outputs("with", "without")
    assert verified(world)
    assert all(sum(map(bool, plan.num_draft_tokens)) <= 1 for plan in world.trace)


def test_a_draft_is_told_of_no_grammar() -> None:
    """It has no automata: the worker cuts what breaks one."""
    world, told = speculating(), []
    draft = world.drafts["d"]
    answer = draft.answer

    def kept(update: DraftUpdate) -> list[DraftProposals]:
        told.extend(update.opened)
        return answer(update)

    draft.answer = kept  # type: ignore[method-assign]
    world.add("held", [1, 2, 3], max_tokens=20, grammar=Grammar(GrammarKind.COMPILED, "start: /x*/"))
    world.add("free", [4, 5], max_tokens=20)
    world.run()
    assert len(told) == 2 and all(one.params.grammar is None and one.params.max_tokens == 20 for one in told)
    held = [one.params.grammar for plan in world.trace for one in plan.admitted]
    assert [one is not None for one in held] == [True, False], "the worker is"


def test_blocks_for_drafts_never_preempt_anyone() -> None:
    world = speculating(8, skill=0.9, num_blocks=8, block_size=8, max_num_seqs=4)
    for index in range(3):
        world.add(f"r{index}", [index] * 6, max_tokens=14)
    world.run()
    world.assert_outputs("r0", "r1", "r2")
    assert not world.scheduler.counters.num_preemptions
    assert verified(world)


def test_preemption_beside_drafts() -> None:
    world = speculating(4, skill=0.9, num_blocks=9, block_size=8)
    for index in range(6):
        world.add(f"r{index}", [index] * 6, max_tokens=40)
    world.run()
    world.assert_outputs(*(f"r{index}" for index in range(6)))
    world.assert_idle()
    assert world.scheduler.counters.num_preemptions
    assert world.scheduler.counters.num_accepted_tokens


def test_a_draft_that_comes_anew_is_told_everything_again() -> None:
    """The draft ends and starts again, under the same name, before the scheduler notices that it has ended."""
    world = speculating(skill=1.0)
    world.add("r", [1, 2, 3], max_tokens=40)
    for _ in range(6):
        world.step()
    num_drafts = len(verified(world))
    assert num_drafts
    world.join_draft("d", FakeDraft(skill=1.0))
    world.run()
    world.assert_outputs("r")
    assert len(verified(world)) > num_drafts + 3 and world.drafts["d"].rows == {}
    world.assert_idle()


def test_a_silent_draft_is_waited_for_once() -> None:
    world = speculating()
    world.add("r", [1, 2, 3], max_tokens=20)
    num_waits = 0
    while not world.finished:
        if world.plan("w0") is None and not world.plans["w0"]:
            wake_time = world.scheduler.wake_time
            assert wake_time is not None
            world.now, num_waits = wake_time, num_waits + 1
        world.answer("w0")
    world.assert_outputs("r")
    assert num_waits == world.scheduler.counters.num_late_drafts == 1
    assert not verified(world)
    while world.propose("d"):  # it wakes, and reads what it was sent
        pass
    world.add("next", [4, 5, 6], max_tokens=20)
    world.run()
    world.assert_outputs("next")
    assert verified(world)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_draft_that_is_gone_is_not_waited_for(comes_back: bool) -> None:
    """The other draft has answered: nothing else is awaited, also where the first one comes back in another life."""
    world = speculating()
    world.join_draft("e", FakeDraft(skill=1.0))
    for index in range(2):
        world.add(f"r{index}", [index, 7, 9], max_tokens=20)
    world.plan("w0")
    world.answer("w0")
    assert world.plan("w0") is None and world.updates["d"] and world.updates["e"]
    if comes_back:
        world.join_draft("d", FakeDraft())
    else:
        world.lose_draft("d")
    assert world.plan("w0") is None, "the other one is awaited"
    world.propose("e")
    assert world.plan("w0") is not None and len(verified(world)) == 1
    world.run()
    world.assert_outputs("r0", "r1")


def test_what_no_longer_agrees_is_dropped_and_the_rest_is_used() -> None:
    world = speculating(4, skill=1.0)
    world.add("r", [1, 2, 3], max_tokens=40)
    world.plan("w0")
    world.answer("w0")
    assert world.plan("w0") is None  # waits
    update = world.updates["d"].popleft()
    (proposals,) = world.drafts["d"].answer(update)
    world.now = 100.0
    world.plan("w0")  # without
    world.answer("w0")
    assert world.scheduler.propose(proposals)  # made on one token less
    (sequence,) = world.scheduler.requests["r"].sequences
    assert world.scheduler.drafts.usable(sequence).token_ids == proposals.draft_token_ids[1:]
    world.run()
    world.assert_outputs("r")


def test_stale_drafts_are_counted() -> None:
    world = speculating(4, skill=0.0)
    world.add("r", [1, 2, 3], max_tokens=10)
    world.run()
    world.assert_outputs("r")
    assert world.scheduler.counters.num_accepted_tokens == 0


def proposals(**changes: Any) -> DraftProposals:
    good: dict[str, Any] = {
        "epoch": 2, "update_id": 1, "rows": [0], "num_tokens": [4], "num_draft_tokens": [2], "draft_token_ids": [1, 2],
    }  # fmt: skip
    return DraftProposals(**{**good, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": []},
        {"num_draft_tokens": [3]},
        {"num_draft_tokens": [-1]},
        {"num_draft_tokens": [1000], "draft_token_ids": [1] * 1000},
        {"num_draft_tokens": [18], "draft_token_ids": [1] * 18},  # twice as many as may be, and one more, are 17
        {"distributions": [DraftDistribution(b"1234", b"1234")]},
        {"distributions": [DraftDistribution(b"1234", b"1234"), DraftDistribution(b"1234", b"12345678")]},
        {"distributions": [DraftDistribution(b"12345", b"12345")] * 2},
        {"num_tokens": []},
        {"draft_token_ids": [1, 50]},
        {"draft_token_ids": [1, -1]},
        {"num_tokens": [-4]},
        {"update_id": 77},
    ],
)
def test_nonsense_is_refused_whole(changes: dict[str, Any]) -> None:
    world = speculating(2)
    world.add("r", [1, 2, 3], max_tokens=20)
    world.plan("w0")
    world.answer("w0")
    world.plan("w0")
    assert world.updates["d"]
    with pytest.raises(ProtocolError):
        world.scheduler.propose(proposals(**changes))
    assert world.scheduler.propose(proposals())
    assert not world.scheduler.propose(proposals(epoch=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_draft_tokens": [17], "draft_token_ids": [1] * 17},
        {"num_draft_tokens": [0], "draft_token_ids": []},
        {"draft_token_ids": [0, 49], "distributions": [DraftDistribution(b"12345678", b"12345678")] * 2},
        {"num_tokens": [0]},
        {"rows": [0, 9], "num_tokens": [4, 7], "num_draft_tokens": [1, 1]},
    ],
)
def test_what_is_within_its_edges_is_taken(changes: dict[str, Any]) -> None:
    world = speculating(2)
    world.add("r", [1, 2, 3], max_tokens=20)
    world.plan("w0")
    world.answer("w0")
    world.plan("w0")
    assert world.scheduler.propose(proposals(**changes))


@pytest.mark.parametrize(
    ("counts", "seconds"), [([2], [0.25]), ([0], []), ([], [])], ids=["two tokens", "none of a row", "no rows"]
)
def test_the_time_of_a_draft_is_that_of_one_of_its_tokens(
    counts: list[int], seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    monkeypatch.setattr(Speculation, "drafted", lambda self, time: found.append(time))
    world = speculating(2)
    world.add("r", [1, 2, 3], max_tokens=20)
    world.plan("w0")
    world.answer("w0")
    world.plan("w0")
    rows = {"rows": [0] * len(counts), "num_tokens": [4] * len(counts)}
    given = proposals(**rows, num_draft_tokens=counts, draft_token_ids=[1] * sum(counts), draft_time=0.5)
    assert world.scheduler.propose(given) and found == seconds


def test_a_worker_that_accepts_what_was_not_drafted_is_out_of_step() -> None:
    world = speculating(2, skill=1.0)
    world.add("r", [1, 2, 3], max_tokens=20)
    world.plan("w0")
    world.answer("w0")
    world.plan("w0")
    world.propose("d")
    plan = world.plan("w0")
    assert isinstance(plan, StepPlan)
    right = plan.draft_token_ids
    for tokens in ([], [*right, 1, 1], [right[0] + 1, 0], [right[0], right[1] + 1, 3]):
        with pytest.raises(ProtocolError):
            world.scheduler.apply("w0", StepResult(plan.epoch, plan.step_id, [len(tokens)], tokens))


class Storm:
    """One seeded stream of events, drafts among them."""

    def __init__(self, seed: int) -> None:
        self.random = r = random.Random(seed)
        policy = Policy(
            max_num_batched_tokens=r.choice([24, 64]),
            num_draft_tokens=r.choice([0, 1, 4]),
            scheduling_policy=r.choice(["fcfs", "priority"]),
        )
        self.world = World(
            policy, workers=r.choice([1, 2]), num_blocks=r.choice([16, 20, 40]), max_num_seqs=8, max_model_len=112
        )
        self.num_added = 0
        self.cut: set[str] = set()

    def event(self) -> None:
        world, r, kind = self.world, self.random, self.random.random()
        if kind < 0.35 and world.workers:
            world.plan(r.choice(list(world.workers)))
        elif kind < 0.65 and world.workers:
            world.answer(r.choice(list(world.workers)))
        elif kind < 0.88 and world.drafts:
            world.propose(r.choice(list(world.drafts)))
        elif kind < 0.93:
            self.add()
        elif kind < 0.95:
            world.now += r.choice([0.001, 10.0])
        else:
            self.disturb()

    def add(self) -> None:
        if len(self.world.scheduler.requests) > 12:
            return
        self.num_added += 1
        r = self.random
        prompt = [7 * r.randrange(3) + j for j in range(r.randrange(1, 30))]
        n = r.choice([1, 1, 1, 2])
        params: dict[str, Any] = {"max_tokens": r.randrange(1, 50), "seed": r.randrange(9), "n": n}
        self.world.add(f"r{self.num_added}", prompt, speculate=r.random() < 0.9, ignore_eos=r.random() < 0.5, **params)

    def disturb(self) -> None:
        world, r = self.world, self.random
        kind = r.randrange(5)
        if kind == 0 and world.drafts:
            world.lose_draft(r.choice(list(world.drafts)))
        elif kind == 1 and len(world.drafts) < 3:
            draft = FakeDraft(r.randrange(99), skill=r.random(), num_rows=r.choice([2, 16]), forgets=r.choice([0, 0.1]))
            world.join_draft(f"d{world.epoch}", draft)
        elif kind == 2 and world.workers and r.random() < 0.3:
            world.lose(r.choice(list(world.workers)))
        elif kind == 3 and len(world.workers) < 3:
            world.join(f"w{world.epoch}")
        elif kind == 4 and world.scheduler.requests:
            request_id = r.choice(list(world.scheduler.requests))
            self.cut.add(request_id)
            world.abort(request_id)

    def settle(self) -> None:
        if not self.world.workers:
            self.world.join("last")
        self.world.run()
        self.world.assert_idle()
        whole = [request_id for request_id, _ in self.world.finished if request_id not in self.cut]
        self.world.assert_outputs(*whole)


@pytest.mark.timeout(300)
def test_invariants_hold_through_events_with_drafts() -> None:
    num_events, seed, seen = 0, 0, dict.fromkeys(("num_accepted_tokens", "num_late_drafts", "num_stale_draft_tokens",
                                                  "num_preemptions", "num_worker_losses"), 0)  # fmt: skip
    while num_events < EVENTS:
        storm = Storm(seed)
        for _ in range(2000):
            storm.event()
        storm.settle()
        for name in seen:
            seen[name] += getattr(storm.world.scheduler.counters, name)
        num_events += storm.world.num_events
        seed += 1
    assert EVENTS < ENOUGH or all(seen.values()), f"the storm was too calm: {seen}"


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_drafts_know_how_they_are_accepted(acceptance: str) -> None:
    world = World(Policy(num_draft_tokens=3, acceptance=acceptance))
    world.join_draft("d", FakeDraft(skill=1.0))
    world.add("r", [1, 2, 3], max_tokens=9)
    while not world.updates["d"]:
        world.step()
        world.plan("w0")
    assert world.updates["d"][0].rejection is (acceptance == "rejection")


def test_a_draft_follows_what_it_has_room_for() -> None:
    world = World(Policy(num_draft_tokens=3))
    world.join_draft("d", FakeDraft(skill=1.0))
    (link,) = world.scheduler.drafts.links.values()
    world.add("r", [1] * 20)
    (sequence,) = world.scheduler.requests["r"].sequences
    for length, can_follow in ((21, True), (20, False), (19, False)):
        link.capacity = msgspec.structs.replace(link.capacity, max_model_len=length)
        assert link.can_follow(sequence) is can_follow
