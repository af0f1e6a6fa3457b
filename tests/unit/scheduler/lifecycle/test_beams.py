"""Beam searches through the scheduler: what is forked, dropped, preempted and lost on the way changes no outcome."""

from __future__ import annotations

import random

import msgspec
import pytest

from services.scheduler.lifecycle.beams import is_usable
from services.scheduler.state.beam_search import BeamSearch
from services.scheduler.state.policy import Policy
from services.scheduler.state.sequence import Status
from shared.errors import RejectCode
from shared.messages import AddRequest, FinishReason, RequestHeader, StreamLost, TokenBatch, TokenLogprobs
from shared.packing import pack_tokens
from shared.requests.beam import Beam, EarlyStopping
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.unit.scheduler.worlds.beam_world import BeamWorker, BeamWorld, logprobs_of, search
from tests.unit.scheduler.worlds.fake_worker import FakeWorker, capacity

PROMPT = list(range(1, 20))


def test_a_search_has_the_outcome_that_it_has_alone() -> None:
    world = BeamWorld()
    world.add_beam("r", PROMPT, Beam(4), n=3)
    world.run()
    world.assert_outputs("r")
    assert world.finished == {("r", index): FinishReason.LENGTH for index in range(3)}
    world.assert_idle()


def test_forks_share_full_blocks_and_copy_the_last() -> None:
    world = BeamWorld(block_size=8)
    world.add_beam("r", PROMPT, Beam(4), max_tokens=12)
    most = 0
    while world.plan("w0"):
        replica = world.scheduler.replicas["w0"]
        tables = [sequence.block_ids for sequence in replica.running]
        if len(tables) == 4:
            assert len({table[0] for table in tables}) == len({table[1] for table in tables}) == 1
            most = max(most, sum(len(table) for table in tables) - replica.pool.size + replica.pool.num_available)
        world.answer("w0")
    assert most >= 6, "two full blocks of the prompt, held four times each"
    assert world.scheduler.counters.num_block_copies > 3
    assert world.scheduler.counters.num_preemptions == 0
    world.assert_outputs("r")


def test_only_what_differs_is_told_anew() -> None:
    world = BeamWorld()
    world.add_beam("r", PROMPT, Beam(1), max_tokens=20)
    world.run()
    worker = world.workers["w0"]
    assert isinstance(worker, BeamWorker)
    assert worker.num_told == 1, "a search of one takes what the worker takes"
    world.assert_outputs("r")


@pytest.mark.parametrize("budget", [2, 3])
def test_a_search_wider_than_a_step_has_tokens_goes_on_in_turns(budget: int) -> None:
    """No plan has more than its budget: the world looks at each."""
    world = BeamWorld(Policy(max_num_batched_tokens=budget), block_size=4)
    world.add_beam("r", PROMPT[:5], Beam(5), n=2, max_tokens=12)
    world.run()
    world.assert_outputs("r")
    assert max(len(plan.rows) for plan in world.trace) == budget


def test_a_worker_that_does_not_say_what_is_likely_ends_the_search() -> None:
    world = BeamWorld()
    world.workers["w0"] = FakeWorker(world.workers["w0"].capacity)
    world.add_beam("r", PROMPT, Beam(3))
    world.run()
    assert world.rejected == {"r": RejectCode.INTERNAL}
    world.assert_idle()


def test_a_search_that_finds_fewer_than_were_asked_for_says_how_many() -> None:
    world = BeamWorld(workers=0, vocab_size=2)
    world.join("w0", msgspec.structs.replace(capacity(), vocab_size=2))
    world.add("r", PROMPT, beam=Beam(4), n=3, max_tokens=1)
    world.plan("w0")
    world.answer("w0")
    assert world.rejected == {"r": RejectCode.INVALID_ARGUMENT}
    world.assert_idle()


def test_log_probabilities_of_a_search_come_with_its_tokens() -> None:
    world, said = BeamWorld(), {}
    gather = world.scheduler.outbound.take_batches

    def taken() -> dict[str, TokenBatch]:
        batches = gather()
        said.update({one.index: one.logprobs for batch in batches.values() for one in batch.sequences})
        return batches

    world.scheduler.outbound.take_batches = taken  # type: ignore[method-assign]
    world.add_beam("r", PROMPT, Beam(3), n=2, logprobs=2)
    world.run()
    world.assert_outputs("r")
    for index in range(2):
        history = list(PROMPT)
        for token, entry in zip(world.outputs["r", index], said[index], strict=True):
            assert entry is not None and entry.token_ids[0] == token
            assert entry.logprobs[0] == pytest.approx(logprobs_of(history, 50)[token])
            history.append(token)


def test_ends_are_kept_and_named() -> None:
    world = BeamWorld()
    world.add_beam("r", PROMPT, Beam(3), n=3, ignore_eos=False, stop_token_ids=[5, 6, 7, 8, 9], max_tokens=30)
    world.run()
    world.assert_outputs("r")
    assert FinishReason.STOP in world.finished.values()


def test_searches_wider_than_a_worker_has_rows_take_turns() -> None:
    world = BeamWorld(max_num_seqs=3)
    world.add_beam("a", PROMPT, Beam(8), n=8)
    world.add_beam("b", PROMPT[3:], Beam(7), n=2)
    world.run()
    world.assert_outputs()
    assert len(world.finished) == 10
    world.assert_idle()


def test_searches_that_hold_all_blocks_make_room_for_each_other() -> None:
    world = BeamWorld(num_blocks=9, block_size=8, max_num_seqs=16)
    for name in "abc":
        world.add_beam(name, [ord(name) % 50, *PROMPT], Beam(6), n=1, max_tokens=24)
    world.run()
    world.assert_outputs()
    assert len(world.finished) == 3
    assert world.scheduler.counters.num_preemptions
    world.assert_idle()


def test_a_lost_worker_costs_a_search_nothing_but_time() -> None:
    world = BeamWorld(workers=2)
    world.add_beam("r", PROMPT, Beam(4), n=4, max_tokens=20)
    for _ in range(9):
        world.step()
    world.lose("w0")
    for _ in range(9):
        world.step()
    world.lose("w1")
    world.join("w2")
    world.run()
    world.assert_outputs("r")
    world.assert_idle()


def test_nothing_is_told_before_the_end_and_all_of_it_again_after() -> None:
    world = BeamWorld()
    world.acknowledges = False
    world.add_beam("r", PROMPT, Beam(3), n=2)
    for _ in range(5):
        world.step()
        world.scheduler.stream_lost(StreamLost("r", 0))
        world.scheduler.set_detokenizers([f"d{world.num_events}"])
        assert not world.outputs
    world.run()
    world.assert_outputs("r")
    world.outputs.clear()
    world.scheduler.stream_lost(StreamLost("r", 0))
    world.gather()
    world.assert_outputs("r")


def test_a_search_whose_client_comes_back_begins_again() -> None:
    world = BeamWorld()
    params = SamplingParams(beam=Beam(3), n=2, max_tokens=8, ignore_eos=True).resolved(
        GenerationDefaults(), max_tokens=16
    )
    header = RequestHeader("r", "g0", is_kept=True, arrival_time=1.0)
    world.scheduler.add(AddRequest(header, params, pack_tokens(PROMPT)), now=0.0)
    for _ in range(4):
        world.step()
    world.abort("r")
    assert not world.scheduler.requests
    again = RequestHeader("r", "g1", is_kept=True, arrival_time=2.0)
    world.scheduler.add(AddRequest(again, params, pack_tokens(PROMPT)), now=0.0)
    assert [one.status for one in world.scheduler.requests["r"].sequences[1:]] == [Status.FINISHED] * 2, "they rest"
    world.run()
    found = search(PROMPT, params, 50, 128)
    assert [world.outputs["r", index] for index in range(2)] == [one.token_ids for one in found[:2]]


def test_a_resumed_search_tells_everything_from_the_start() -> None:
    """What a gateway has of it came at its end: the new scheduler comes to the same end."""
    world = BeamWorld()
    params = SamplingParams(beam=Beam(3), n=2, max_tokens=8, ignore_eos=True).resolved(
        GenerationDefaults(), max_tokens=16
    )
    found = search(PROMPT, params, 50, 128)
    sent = [pack_tokens(found[0].token_ids), b""]
    header = RequestHeader("r", "g0")
    message = AddRequest(header, params, pack_tokens(PROMPT), [], sent, is_resumed=True, sent_finished=[True, False])
    world.scheduler.add(message, now=0.0)
    world.run()
    assert [world.outputs["r", index] for index in range(2)] == [one.token_ids for one in found[:2]]


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("beam_width", {"beam": Beam(0)}),
        ("beam_width", {"beam": Beam(65)}),
        ("n", {"beam": Beam(2), "n": 3}),
        ("length_penalty", {"beam": Beam(2, float("nan"))}),
        ("length_penalty", {"beam": Beam(2, 11.0)}),
        ("temperature", {"beam": Beam(2), "temperature": 0.7}),
        ("top_k", {"beam": Beam(2), "top_k": 5}),
        ("top_p", {"beam": Beam(2), "top_p": 0.5}),
        ("min_p", {"beam": Beam(2), "min_p": 0.1}),
        ("presence_penalty", {"beam": Beam(2), "presence_penalty": 1.0}),
        ("frequency_penalty", {"beam": Beam(2), "frequency_penalty": 1.0}),
        ("repetition_penalty", {"beam": Beam(2), "repetition_penalty": 1.1}),
        ("logit_bias", {"beam": Beam(2), "logit_bias": {3: 1.0}}),
        ("allowed_token_ids", {"beam": Beam(2), "allowed_token_ids": [3]}),
        ("bad_words", {"beam": Beam(2), "bad_words_token_ids": [[3]]}),
        ("stop", {"beam": Beam(2), "stop": ["x"]}),
        ("prompt_logprobs", {"beam": Beam(2), "prompt_logprobs": 1}),
    ],
)
def test_what_cannot_be_searched_for_is_refused_by_name(field: str, params: dict[str, object]) -> None:
    world = BeamWorld()
    resolved = SamplingParams(**params).resolved(GenerationDefaults(), max_tokens=16)  # type: ignore[arg-type]
    world.scheduler.add(AddRequest(RequestHeader("r", "g0"), resolved, pack_tokens(PROMPT)), now=0.0)
    ((_, rejection),) = world.scheduler.outbound.take_rejections()
    assert (rejection.code, rejection.field) == (RejectCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize("seed", range(12))
def test_searches_among_other_requests_in_a_storm(seed: int) -> None:
    """Random order of plans, answers, aborts and deaths, with hardly any blocks: every outcome is the one had alone."""
    chance = random.Random(seed)
    policy = Policy(
        max_num_batched_tokens=chance.choice([8, 16, 64]),
        long_prefill_token_threshold=chance.choice([0, 10]),
        enable_prefix_caching=chance.random() < 0.7,
    )
    limits = {"num_blocks": chance.choice([14, 20, 40]), "max_num_seqs": chance.choice([3, 6, 12])}
    world = BeamWorld(policy, workers=chance.choice([1, 2]), block_size=8, max_model_len=96, **limits)
    num_added = 0
    aborted: set[str] = set()
    for _ in range(4000):
        kind, name = chance.random(), chance.choice(list(world.workers))
        if kind < 0.45:
            world.plan(name)
        elif kind < 0.9:
            world.answer(name)
        elif kind < 0.97 and len(world.scheduler.requests) < 8:
            num_added += 1
            prompt = [chance.randrange(1, 4) for _ in range(chance.randrange(1, 40))]
            if chance.random() < 0.5:
                beam = Beam(chance.randrange(1, 8), chance.choice([0.0, 1.0, 2.0]), chance.choice(list(EarlyStopping)))
                ends = [] if chance.random() < 0.5 else [4, 5, 6]
                n = chance.randrange(1, beam.width + 1)
                length = chance.randrange(1, 30)
                world.add_beam(f"r{num_added}", prompt, beam, n, max_tokens=length, stop_token_ids=ends)
            else:
                world.add(f"r{num_added}", prompt, max_tokens=chance.randrange(1, 30), n=chance.randrange(1, 3))
        elif kind < 0.985 and world.scheduler.requests:
            aborted.add(chance.choice(list(world.scheduler.requests)))
            world.abort(next(iter(aborted - {key[0] for key in world.finished}), "none"))
        elif kind < 0.99:
            world.lose(name)
            world.join(f"{name}x" if len(name) < 9 else f"w{num_added}")
    world.run()
    world.assert_outputs(*{key[0] for key in world.finished} - aborted)
    assert len(world.finished) > 30
    world.assert_idle()


@pytest.mark.parametrize(
    ("ids", "num_logprobs", "is_good"),
    [
        ([5, 5, 6, 0], 4, True),
        ([49, 5, 6, 49, 3], 5, True),
        ([5, 5, 6], 3, False),  # two go on, and one may end before them
        ([5, 5, 6, 0], 3, False),
        ([5, 5, 6, 50], 4, False),
        ([5, 5, 6, -1], 4, False),
        ([50, 5, 6, 0], 4, False),
    ],
)
def test_candidates_are_all_that_a_search_needs_and_of_the_vocabulary(
    ids: list[int], num_logprobs: int, is_good: bool
) -> None:
    found = TokenLogprobs(ids, [-1.0] * num_logprobs, 1)
    assert is_usable(found, BeamSearch(Beam(2), frozenset((0,)), None), 50) is is_good


def test_where_the_vocabulary_is_smaller_than_a_search_all_of_it_is_enough() -> None:
    wide = BeamSearch(Beam(9), frozenset((0,)), None)
    assert is_usable(TokenLogprobs([1, 1, 0, 2], [-1.0] * 4, 1), wide, 3)
    assert not is_usable(TokenLogprobs([1, 1, 0], [-1.0] * 3, 1), wide, 3)


def test_a_worker_masks_no_end_of_a_search() -> None:
    """The search itself keeps what is too short, and needs to see how likely an end is."""
    world = BeamWorld()
    world.add_beam("r", PROMPT, Beam(2), min_tokens=3)
    plan = world.plan("w0")
    assert plan is not None and [one.params.min_tokens for one in plan.admitted] == [0]
