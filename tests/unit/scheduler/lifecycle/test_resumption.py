"""A new scheduler goes on with what an earlier one had begun, from what clients have; and who is blamed for deaths."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.scheduler.state.policy import Policy
from shared.errors import RejectCode
from shared.messages import AddRequest, RequestHeader
from shared.packing import pack_tokens
from shared.requests.grammar import Grammar, GrammarKind
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.unit.scheduler.worlds.beam_world import BeamWorld
from tests.unit.scheduler.worlds.world import World, expected


def resumption(
    request_id: str, prompt: list[int], sent: list[list[int]], finished: list[bool] | None = None, **params: Any
) -> AddRequest:
    params = {"max_tokens": 8, "seed": 1, "ignore_eos": True, **params}
    resolved = SamplingParams(**params).resolved(GenerationDefaults(), max_tokens=16)
    packed = [pack_tokens(tokens) for tokens in sent]
    return AddRequest(
        RequestHeader(request_id, "g0"), resolved, pack_tokens(prompt), [0], packed, is_resumed=True,
        sent_finished=finished or [],
    )  # fmt: skip


def solo(message: AddRequest, prompt: list[int], index: int = 0) -> list[int]:
    return expected(prompt, message.params, index, 128)


def add(world: World, message: AddRequest) -> None:
    world.scheduler.add(message, now=0.0)
    world.after()


@pytest.mark.parametrize("num_sent", range(9))
def test_a_sequence_goes_on_behind_what_was_sent(num_sent: int) -> None:
    world = World()
    wanted = solo(resumption("a", [1, 2, 3], []), [1, 2, 3])
    add(world, resumption("a", [1, 2, 3], [wanted[:num_sent]]))
    world.run()
    assert world.outputs["a", 0] == wanted, "told from the start"
    generated = world.scheduler.counters.num_output_tokens
    assert generated == max(1, len(wanted) - num_sent), "and only what is missing was made"
    world.assert_idle()


def test_siblings_stand_where_each_of_them_stood() -> None:
    world = World()
    asked = resumption("a", [1, 2, 3], [], n=4, temperature=1.0)
    wanted = [solo(asked, [1, 2, 3], index) for index in range(4)]
    sent = [wanted[0][:5], [], wanted[2][:2], []]
    add(world, resumption("a", [1, 2, 3], sent, [False, True, False, False], n=4, temperature=1.0))
    world.run()
    assert {index: world.outputs["a", index] for index in (0, 2, 3)} == {i: wanted[i] for i in (0, 2, 3)}
    assert ("a", 1) not in world.outputs, "what had finished is not told again"
    assert world.scheduler.counters.num_output_tokens == 8 * 3 - 7
    world.assert_idle()


def test_the_first_sibling_may_be_the_one_that_is_through() -> None:
    world = World(workers=2)
    asked = resumption("a", list(range(1, 40)), [], n=3, temperature=1.0)
    add(world, resumption("a", list(range(1, 40)), [[]], [True], n=3, temperature=1.0))
    world.run()
    for index in (1, 2):
        assert world.outputs["a", index] == solo(asked, list(range(1, 40)), index)
    world.assert_idle()


@pytest.mark.parametrize("when", ["running", "put aside", "parked"])
def test_a_client_that_comes_back_gets_what_had_ended_in_an_earlier_life(when: str) -> None:
    """The gateway that knew it is not the one that is asked now."""
    world = World()
    world.acknowledges = False
    asked = resumption("a", [1, 2, 3], [], n=2, temperature=1.0)
    wanted = {("a", index): solo(asked, [1, 2, 3], index) for index in range(2)}
    earlier = resumption("a", [1, 2, 3], [[], wanted["a", 1][:3]], [True, False], n=2, temperature=1.0)
    earlier = msgspec.structs.replace(earlier, header=RequestHeader("a", "g0", is_kept=True, arrival_time=1.0))
    add(world, earlier)
    world.step()
    if when == "put aside":
        world.run()
    if when == "parked":
        world.scheduler.abort_gateway("g0")
    add(world, msgspec.structs.replace(asked, header=RequestHeader("a", "g1", is_kept=True, arrival_time=2.0)))
    world.run()
    assert world.outputs == wanted and world.finished.keys() == wanted.keys()
    assert list(world.scheduler.finished) == ["a"] and not world.scheduler.requests


def test_what_would_have_ended_it_ends_it() -> None:
    world = World()
    wanted = solo(resumption("a", [1, 2], []), [1, 2])
    add(world, resumption("a", [1, 2], [wanted[:4]], stop_token_ids=[wanted[3]]))
    world.run()
    assert world.outputs["a", 0] == wanted[:4] and ("a", 0) in world.finished
    world.assert_idle()


def test_a_replay_of_what_is_there_is_ignored() -> None:
    world = World()
    world.add("a", [1, 2], max_tokens=8)
    for _ in range(3):
        world.step()
    add(world, resumption("a", [1, 2], [world.outputs["a", 0]]))
    world.run()
    world.assert_outputs("a")
    assert world.scheduler.counters.num_finished == 1


def test_a_full_queue_does_not_refuse_what_was_accepted_before() -> None:
    world = World(Policy(max_num_queued_reqs=1), workers=1, max_num_seqs=1)
    for index in range(4):
        add(world, resumption(f"r{index}", [1, 2, index], [[]]))
    world.add("new", [1])
    assert world.rejected == {"new": RejectCode.RESOURCE_EXHAUSTED}
    world.run()
    assert {key[0] for key in world.finished} == {"r0", "r1", "r2", "r3"}


@pytest.mark.parametrize(
    ("sent", "finished"), [([[1], [2]], []), ([[10**6]], []), ([[-1]], []), ([], [True]), ([], [False, True])]
)
def test_a_resumption_that_makes_no_sense_is_refused(sent: list[list[int]], finished: list[bool]) -> None:
    world = World()
    add(world, resumption("a", [1, 2], sent, finished))
    assert world.rejected == {"a": RejectCode.INVALID_ARGUMENT}
    world.assert_idle()


def test_prompt_logprobs_are_not_made_twice() -> None:
    world = World()
    add(world, resumption("a", [1, 2, 3], [[5]], prompt_logprobs=2))
    plan = world.plan("w0")
    assert plan is not None and plan.admitted[0].params.prompt_logprobs is None
    add(world, resumption("b", [1, 2, 3], [[]], prompt_logprobs=2))
    plan = world.plan("w0")
    assert plan is not None and plan.admitted[0].params.prompt_logprobs == 2


def test_what_kills_workers_ends_alone_and_those_beside_it_go_on() -> None:
    world = World(Policy(max_num_batched_tokens=512), workers=1)
    for index in range(6):
        world.add(f"r{index}", [1, 2, 3, index], max_tokens=12)
    deadly = {"r1", "r4"}
    for _ in range(1000):
        plan = world.plan("w0") or (world.plans["w0"][0] if world.plans["w0"] else None)
        if plan is None:
            break
        running = {s.request.request_id for step in world.scheduler.replicas["w0"].in_flight for s in step.sequences}
        far = {name for name in deadly & running if len(world.outputs.get((name, 0), [])) >= 3}
        if far:
            world.lose("w0")
            world.join("w0")
        else:
            world.answer("w0")
    assert world.rejected == dict.fromkeys(deadly, RejectCode.INTERNAL)
    assert {key[0] for key in world.finished} == {"r0", "r2", "r3", "r5"}
    world.assert_outputs()
    assert 2 < world.scheduler.counters.num_worker_losses <= 6
    world.assert_idle()


def test_who_gets_on_between_two_deaths_is_not_blamed() -> None:
    world = World()
    world.add("long", list(range(1, 13)), max_tokens=50)
    for _ in range(4):
        for _ in range(3):
            world.step()
        world.plan("w0")
        world.lose("w0")
        world.join("w0")
    assert not world.rejected and world.scheduler.counters.num_worker_losses == 4
    world.run()
    world.assert_outputs("long")


def test_what_was_sent_has_no_log_probabilities_here_and_what_follows_does() -> None:
    world = BeamWorld()
    add(world, resumption("a", [1, 2, 3], [[7, 8]], logprobs=1, max_tokens=4))
    (sequence,) = world.scheduler.requests["a"].sequences
    assert sequence.logprobs == [None, None]
    while world.scheduler.requests:
        assert world.step()
    assert len(sequence.logprobs) == 4 and None not in sequence.logprobs[2:]


def test_an_end_by_a_grammar_is_left_out_whatever_min_tokens_says() -> None:
    grammar = Grammar(GrammarKind.COMPILED, "x")
    world = World()
    add(world, resumption("a", [1, 2, 3], [[7, 0]], grammar=grammar, min_tokens=5))
    add(world, resumption("b", [1, 2, 3], [[7, 0]], min_tokens=5, ignore_eos=False))
    assert world.scheduler.requests["a"].sequences[0].token_ids == [1, 2, 3, 7]
    assert world.scheduler.requests["b"].sequences[0].token_ids == [1, 2, 3, 7, 0]
