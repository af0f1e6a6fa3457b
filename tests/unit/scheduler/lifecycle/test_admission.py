"""The one gate: ranges, limits, overload; each refusal names its field and its limit."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import pytest

from services.scheduler.state.policy import Policy
from shared.errors import RejectCode, RequestError
from shared.messages import AddRequest, RequestHeader
from shared.packing import pack_tokens
from shared.requests.beam import Beam
from shared.requests.sampling import MAX_BIAS, GenerationDefaults, Limits, SamplingParams, check_sampling
from tests.unit.scheduler.worlds.world import World

LIMITS = Limits(vocab_size=100, max_model_len=64, max_input_length=40, max_num_blocks=4, block_size=16)
NAN, INF = float("nan"), float("inf")

BAD: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "[0, 2]"),
    ("temperature", 2.1, "[0, 2]"),
    ("temperature", NAN, "[0, 2]"),
    ("temperature", INF, "[0, 2]"),
    ("top_p", 0.0, "(0, 1]"),
    ("top_p", 1.1, "(0, 1]"),
    ("top_p", NAN, "(0, 1]"),
    ("min_p", -0.1, "[0, 1]"),
    ("min_p", NAN, "[0, 1]"),
    ("top_k", -2, "-1"),
    ("frequency_penalty", 2.5, "[-2, 2]"),
    ("presence_penalty", -2.5, "[-2, 2]"),
    ("presence_penalty", NAN, "[-2, 2]"),
    ("repetition_penalty", 0.0, "greater than zero"),
    ("repetition_penalty", NAN, "finite"),
    ("repetition_penalty", INF, "finite"),
    ("n", 0, "at least 1"),
    ("n", 1000, "64"),
    ("max_tokens", 0, "at least 1"),
    ("min_tokens", -1, "greater than or equal to 0"),
    ("min_tokens", 17, "max_tokens=16"),
    ("logprobs", -2, "-1"),
    ("logprobs", 21, "max_logprobs=20"),
    ("logprobs", -1, "max_logprobs=20"),
    ("prompt_logprobs", 21, "max_logprobs=20"),
    ("stop", [""], "empty"),
    ("stop", ["x" * 2000], "1024"),
    ("stop", ["x"] * 65, "64"),
    ("stop_token_ids", [100], "out of vocabulary: it has 100 ids"),
    ("stop_token_ids", [-1], "out of vocabulary: it has 100 ids"),
    ("logit_bias", {100: 1.0}, "out of vocabulary: it has 100 ids"),
    ("logit_bias", {3: NAN}, "[-10000, 10000]"),
    ("logit_bias", {3: INF}, "[-10000, 10000]"),
    ("logit_bias", {3: -INF}, "[-10000, 10000]"),
    ("logit_bias", {3: 1e38}, "[-10000, 10000]"),
    ("allowed_token_ids", [], "empty"),
    ("allowed_token_ids", [5, 100], "out of vocabulary: it has 100 ids"),
    ("bad_words", [""], "empty"),
    ("seed", 2**63, "64-bit"),
]


@pytest.mark.parametrize(("field", "value", "limit"), BAD)
def test_a_bad_value_is_refused_by_name(field: str, value: Any, limit: str) -> None:
    params = SamplingParams(**{field: value}).resolved(GenerationDefaults(), max_tokens=16)
    with pytest.raises(RequestError) as caught:
        check_sampling(params, LIMITS, 10)
    assert caught.value.field == field
    assert field in str(caught.value)
    assert limit in str(caught.value)
    assert caught.value.code is RejectCode.INVALID_ARGUMENT


def floats_of(kind: type[msgspec.Struct]) -> list[str]:
    return [name for name, hint in get_type_hints(kind).items() if "float" in str(hint)]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("field", floats_of(SamplingParams))
def test_no_field_takes_what_is_no_finite_number(field: str, value: float) -> None:
    """A field that is added tomorrow is found by its type."""
    given: Any = {3: value} if field == "logit_bias" else value
    params = SamplingParams(**{field: given}).resolved(GenerationDefaults(), max_tokens=16)
    with pytest.raises(RequestError, match=field):
        check_sampling(params, LIMITS, 10)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nor_does_a_beam_search(value: float) -> None:
    assert floats_of(Beam) == ["length_penalty"]
    params = SamplingParams(beam=Beam(2, value)).resolved(GenerationDefaults(), max_tokens=16)
    with pytest.raises(RequestError, match="length_penalty"):
        check_sampling(params, LIMITS, 10)


def test_edges_are_accepted() -> None:
    edges = SamplingParams(
        temperature=2, top_p=1, min_p=1, top_k=-1, frequency_penalty=-2, presence_penalty=2, repetition_penalty=0.01,
        min_tokens=16, logprobs=20, prompt_logprobs=0, stop=["x"] * 64, stop_token_ids=[0, 99],
        logit_bias={99: MAX_BIAS},
        allowed_token_ids=[0], seed=-(2**63), n=64,
    )  # fmt: skip
    check_sampling(edges.resolved(GenerationDefaults(), max_tokens=16), LIMITS, 40)


def test_greedy_takes_one_sequence() -> None:
    with pytest.raises(RequestError, match="greedy"):
        check_sampling(SamplingParams(temperature=0.0, n=2, max_tokens=1), LIMITS, 1)


@pytest.mark.parametrize(
    ("length", "text"),
    [(0, "at least one token"), (41, "41 tokens, more than the maximum context length allows: max_input_length=40")],
)
def test_prompts_have_bounds(length: int, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        check_sampling(SamplingParams(max_tokens=1), LIMITS, length)
    check_sampling(SamplingParams(max_tokens=1), LIMITS, 40)


def test_defaults_come_from_the_model_where_the_request_is_silent() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=20)
    resolved = SamplingParams(top_k=-1).resolved(defaults, max_tokens=7)
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.max_tokens) == (0.6, 0, 1.0, 7)


def test_a_request_that_can_never_fit_is_refused() -> None:
    world = World(num_blocks=4)
    world.add("a", [1] * 20, max_tokens=50)
    assert world.rejected == {"a": RejectCode.INVALID_ARGUMENT}
    world.assert_idle()


def test_ids_outside_the_vocabulary_are_refused() -> None:
    world = World()
    world.add("a", [1, 2, 50])
    world.add("b", [1, -1])
    assert set(world.rejected) == {"a", "b"}


def test_full_queues_refuse_with_a_time_to_come_back() -> None:
    world = World(Policy(max_num_batched_tokens=32, max_num_queued_reqs=3))
    for index in range(5):
        world.add(f"r{index}", [1, 2, 3])
    assert world.rejected == dict.fromkeys(("r3", "r4"), RejectCode.RESOURCE_EXHAUSTED)
    world.run()
    world.add("again", [1, 2, 3])
    world.run()
    world.assert_outputs("again")


def test_an_expired_request_is_refused_or_ended() -> None:
    world = World()
    params = SamplingParams(max_tokens=50).resolved(GenerationDefaults(), max_tokens=1)
    for name, deadline in (("late", 5.0), ("soon", 20.0)):
        header = RequestHeader(name, "g0", deadline=deadline)
        world.scheduler.add(AddRequest(header, params, pack_tokens([1, 2])), now=10.0)
    world.after()
    world.step()
    assert world.scheduler.expire(now=15.0) == []
    assert world.scheduler.expire(now=20.0) == ["soon"]
    world.after()
    assert world.rejected == dict.fromkeys(("late", "soon"), RejectCode.DEADLINE_EXCEEDED)
    world.run()
    world.assert_idle()


def test_without_a_worker_or_a_detokenizer_requests_are_refused_at_once() -> None:
    world = World(workers=0)
    world.add("a", [1])
    world.join("w0")
    world.scheduler.set_detokenizers([])
    world.add("b", [1])
    assert world.rejected == dict.fromkeys("ab", RejectCode.UNAVAILABLE)


def test_a_replayed_request_is_taken_once() -> None:
    world = World()
    world.add("a", [1, 2])
    world.add("a", [1, 2])
    world.run()
    world.assert_outputs()
