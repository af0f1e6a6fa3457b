"""Mixed workers: what one kind of worker has begun goes on with that kind, and waits for it where there is none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.scheduler.lifecycle.parking import copy_of
from shared.messages import AddRequest, RequestHeader, WorkerCapacity
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.world import World


def kind(name: str) -> WorkerCapacity:
    return msgspec.structs.replace(capacity(), fingerprint=name)


def world_of(**workers: str) -> World:
    world = World(workers=0)
    for name, fingerprint in workers.items():
        world.join(name, kind(fingerprint))
    return world


def begin(world: World, request_id: str, num_tokens: int = 1, **params: Any) -> str:
    """A request with some output, and where it is."""
    world.add(request_id, list(range(1, 12)), **params)
    request = world.scheduler.requests[request_id]
    while min(sequence.num_output_tokens for sequence in request.sequences) < num_tokens:
        assert world.step()
    return request.sequences[0].worker


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_begun_stream_goes_on_with_its_own_kind_alone(num_sequences: int) -> None:
    world = world_of(w0="fp_a", w1="fp_b")
    where = begin(world, "r", n=num_sequences)
    request = world.scheduler.requests["r"]
    assert request.fingerprint == {"w0": "fp_a", "w1": "fp_b"}[where]
    world.lose(where)
    world.run()
    assert len(world.scheduler.unassigned) == num_sequences, "a worker is free, and computes something else"
    world.join("w2", kind("fp_c"))
    world.run()
    assert len(world.scheduler.unassigned) == num_sequences
    world.join("w3", kind(request.fingerprint))
    world.run()
    assert not world.scheduler.unassigned and not world.scheduler.requests
    world.assert_outputs()


def test_what_has_no_output_yet_goes_anywhere() -> None:
    world = world_of(w0="fp_a")
    world.add("r", list(range(1, 40)))
    assert world.plan("w0") is not None, "a part of its prompt is computed"
    world.lose("w0")
    world.join("w1", kind("fp_b"))
    world.run()
    world.assert_outputs()


def test_a_resumed_stream_waits_for_the_kind_that_its_gateway_names() -> None:
    world = world_of(w0="fp_b")
    prompt = list(range(1, 12))
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True).resolved(GenerationDefaults(), max_tokens=16)
    message = AddRequest(
        RequestHeader("r", "g0"), params, pack_tokens(prompt), [0], sent_token_ids=[pack_tokens([5, 6])],
        is_resumed=True, fingerprint="fp_a",
    )  # fmt: skip
    world.scheduler.add(message, now=0.0)
    assert len(world.scheduler.unassigned) == 1
    world.join("w1", kind("fp_a"))
    assert not world.scheduler.unassigned and world.scheduler.requests["r"].sequences[0].worker == "w1"


def test_what_is_put_aside_for_its_client_is_of_its_kind_still() -> None:
    world = world_of(w0="fp_a")
    world.add("r", list(range(1, 12)))
    request = world.scheduler.requests["r"]
    assert copy_of(request).bound_to == "", "it has no output yet"
    while not request.num_output_tokens:
        assert world.step()
    assert copy_of(request).bound_to == "fp_a"


def test_the_stream_says_what_computed_it() -> None:
    world = world_of(w0="fp_a")
    begin(world, "r")
    request = world.scheduler.requests["r"]
    world.scheduler.outbound.emit_again(request)
    (batch,) = world.scheduler.outbound.take_batches().values()
    assert [opened.fingerprint for opened in batch.opened] == ["fp_a"]
