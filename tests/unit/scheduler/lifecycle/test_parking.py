"""Requests whose clients come back: while they run, after their end, and after they had been put aside."""

from __future__ import annotations

from typing import Any

from services.scheduler.lifecycle.parking import MAX_PARKED, PARKED_SECONDS, is_later_call
from shared.errors import RejectCode
from shared.messages import AddRequest, AttachRequest, OpenStream, RequestHeader, StreamLost, TokenLogprobs
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.unit.scheduler.worlds.world import World, expected

PROMPT = [1, 2, 3]


def keep(world: World, request_id: str = "a", arrival: float = 1.0, gateway: str = "g0", **params: Any) -> None:
    params = {"max_tokens": 12, "seed": 1, "ignore_eos": True, **params}
    resolved = SamplingParams(**params).resolved(GenerationDefaults(), max_tokens=16)
    header = RequestHeader(request_id, gateway, arrival_time=arrival, is_kept=True)
    world.scheduler.add(AddRequest(header, resolved, pack_tokens(PROMPT), [0]), now=0.0)
    for index in range(resolved.n):
        world.wanted[request_id, index] = expected(PROMPT, resolved, index, 128)


def attach(world: World, gateway: str = "g1", request_id: str = "a") -> list[OpenStream]:
    """The streams that are opened for the new gateway."""
    world.after()
    world.scheduler.attach(AttachRequest(request_id, gateway))
    opened = [stream for batch in world.scheduler.outbound.take_batches().values() for stream in batch.opened]
    world.scheduler.stream_lost(StreamLost(request_id, 0))
    world.after()
    return opened


def test_a_running_request_goes_on_for_another_gateway() -> None:
    world = World()
    keep(world)
    for _ in range(4):
        world.step()
    opened = attach(world)
    assert [stream.header.gateway for stream in opened] == ["g1"]
    assert not world.scheduler.abort("a", "g0"), "the old gateway's word does not count any more"
    world.run()
    world.assert_outputs("a")


def test_a_client_s_absence_frees_everything_and_its_return_goes_on() -> None:
    world = World()
    keep(world, n=3, temperature=1.0)
    for _ in range(5):
        world.step()
    world.plan("w0")
    assert world.scheduler.abort("a", "g0")
    world.after()
    replica = world.scheduler.replicas["w0"]
    assert replica.pool.num_available == replica.pool.size and not replica.running
    made = world.scheduler.counters.num_output_tokens
    attach(world)
    world.run()
    world.assert_outputs("a")
    assert world.scheduler.counters.num_output_tokens == 3 * 12, "nothing was made twice"
    assert 0 < made < 3 * 12
    world.scheduler.finished.clear()
    world.assert_idle()


def test_what_came_with_the_first_token_comes_again() -> None:
    world = World()
    keep(world, prompt_logprobs=0)
    world.step()
    (sequence,) = world.scheduler.requests["a"].sequences
    said: list[TokenLogprobs | None] = [TokenLogprobs([token], [-0.5], 1) for token in PROMPT[1:]]
    world.scheduler.outbound.take_prompt_logprobs(sequence, 0, said)
    assert world.scheduler.abort("a", "g0") and sequence not in world.scheduler.outbound.firsts
    (opened,) = attach(world)
    assert opened.prompt_logprobs == [None, *said]


def test_of_two_gateways_calls_the_later_one_counts_and_of_one_s_the_other() -> None:
    def later(gateway: str, arrival: float) -> bool:
        return is_later_call(
            RequestHeader("a", gateway, arrival_time=arrival), RequestHeader("a", "g0", arrival_time=5)
        )

    assert [later("g1", arrival) for arrival in (4.0, 5.0, 6.0)] == [False, False, True]
    assert [later("g0", arrival) for arrival in (4.0, 5.0, 6.0)] == [True, False, True]


def test_the_same_call_again_is_told_what_is_there_and_nothing_is_made_twice() -> None:
    world = World()
    keep(world)
    world.run()
    assert list(world.scheduler.finished) == ["a"], "kept although its client has everything"
    world.outputs.clear()
    keep(world, arrival=0.5, gateway="g7")
    world.after()
    assert not world.outputs, "an older call that comes late changes nothing"
    keep(world, arrival=2.0, gateway="g7")
    world.after()
    world.assert_outputs("a")
    assert world.scheduler.counters.num_output_tokens == 12
    assert world.scheduler.finished["a"].header.gateway == "g7"


def test_a_lost_gateway_s_kept_requests_wait_for_their_clients() -> None:
    world = World()
    keep(world)
    world.add("plain", [4, 5])
    for _ in range(3):
        world.step()
    assert sorted(world.scheduler.abort_gateway("g0")) == ["a", "plain"]
    world.after()
    attach(world)
    world.run()
    world.assert_outputs("a")
    assert ("plain", 0) not in world.finished


def test_what_is_not_kept_is_not_found() -> None:
    world = World()
    world.scheduler.attach(AttachRequest("never", "g1"))
    keep(world)
    world.step()
    world.scheduler.abort("a")
    world.scheduler.expire(100.0)
    world.scheduler.expire(100.0 + PARKED_SECONDS + 1)
    world.scheduler.attach(AttachRequest("a", "g1"))
    world.after()
    assert world.rejected == {"never": RejectCode.NOT_FOUND, "a": RejectCode.NOT_FOUND}
    world.run()
    world.assert_idle()


def test_the_deadline_of_one_call_does_not_end_the_next() -> None:
    world = World()
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True).resolved(GenerationDefaults(), max_tokens=16)
    header = RequestHeader("a", "g0", arrival_time=1.0, deadline=50.0, is_kept=True)
    world.scheduler.add(AddRequest(header, params, pack_tokens(PROMPT), [0]), now=0.0)
    world.wanted["a", 0] = expected(PROMPT, params, 0, 128)
    for _ in range(4):
        world.step()
    world.scheduler.expire(51.0)
    world.after()
    attach(world)
    assert not world.scheduler.expire(52.0)
    world.run()
    world.assert_outputs("a")


def test_there_is_room_for_so_many_only() -> None:
    world = World()
    for index in range(MAX_PARKED + 3):
        keep(world, f"r{index}")
        world.scheduler.abort(f"r{index}")
    for index in (0, 2, 3):
        world.scheduler.attach(AttachRequest(f"r{index}", "g1"))
    world.after()
    assert set(world.rejected) == {"r0", "r2"} and list(world.scheduler.requests) == ["r3"]


def test_a_call_for_what_is_put_aside_gets_it_and_no_other() -> None:
    world = World()
    keep(world)
    for _ in range(4):
        world.step()
    made = len(world.outputs["a", 0])
    assert world.scheduler.abort("a", "g0")
    parked = world.scheduler.parking.get("a")
    assert parked is not None and parked.num_output_tokens >= made > 0 and world.scheduler.parking.get("b") is None
    before = world.scheduler.counters.num_prompt_tokens
    keep(world, arrival=2.0)  # its client asks again: that is no new request
    assert world.scheduler.counters.num_prompt_tokens == before
    world.run()
    world.assert_outputs("a")
