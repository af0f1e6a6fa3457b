"""Limits at their very edges: the last request that is taken, and the first that is not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from services.scheduler.lifecycle.admission import MAX_LOGPROB_ENTRIES, check_logprobs, check_queue, check_request
from services.scheduler.lifecycle.intake import RequestIntake
from services.scheduler.state.policy import Policy
from shared.errors import RejectCode, RequestError
from shared.messages import AddRequest, RequestHeader
from shared.packing import pack_tokens
from shared.requests.sampling import GenerationDefaults, Limits, SamplingParams
from tests.unit.scheduler.worlds.fake_worker import capacity
from tests.unit.scheduler.worlds.world import World

QUEUES = Policy(max_num_queued_reqs=3, max_num_queued_tokens=10)

LIMITS = Limits(
    vocab_size=50, max_model_len=128, max_input_length=127, max_logprobs=20, max_n=4, max_num_blocks=64, block_size=8
)


def refused(check: Any, *args: Any) -> str:
    """The text of the refusal; empty where there is none."""
    try:
        check(*args)
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("num_queued", "num_tokens", "words"),
    [(0, 0, ""), (2, 9, ""), (3, 0, "3 sequences are waiting"), (4, 0, "4 seq"), (0, 10, "10 prompt tokens")],
)
def test_a_queue_is_full_when_it_holds_its_limit(num_queued: int, num_tokens: int, words: str) -> None:
    found = refused(partial(check_queue, is_background=False), num_queued, num_tokens, QUEUES)
    assert found.startswith(words) and bool(found) == bool(words)


def test_a_full_queue_says_when_to_come_back() -> None:
    with pytest.raises(RequestError) as caught:
        check_queue(3, 0, QUEUES, is_background=False)
    assert caught.value.code is RejectCode.RESOURCE_EXHAUSTED and caught.value.retry_after_ms == 1000


def request(priority: int = 0, deadline: float | None = None, eos: int = 0, prompt: int = 3) -> AddRequest:
    resolved = SamplingParams(max_tokens=4).resolved(GenerationDefaults(), max_tokens=16)
    header = RequestHeader("r", "g", priority=priority, deadline=deadline)
    return AddRequest(header, resolved, pack_tokens([prompt]), [eos])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (request(), ""),
        (request(priority=2**31 - 1), ""),
        (request(priority=-(2**31)), ""),
        (request(priority=2**31), "priority must be"),
        (request(priority=-(2**31) - 1), "priority must be"),
        (request(deadline=10.5), ""),
        (request(deadline=10.0), "the deadline had passed"),
        (request(eos=49, prompt=49), ""),
        (request(eos=50), "eos_token_ids"),
        (request(prompt=50), "prompt"),
    ],
)
def test_a_request_is_taken_within_its_edges(message: AddRequest, words: str) -> None:
    prompt = [int.from_bytes(message.prompt_token_ids, "little")]
    found = refused(check_request, message, prompt, LIMITS, 10.0)
    assert (words in found) and bool(found) == bool(words)


def test_log_probabilities_are_as_many_as_fit_together() -> None:
    params = SamplingParams(max_tokens=100, logprobs=1, n=2)
    assert refused(check_logprobs, params, LIMITS, 5) == ""
    fits = MAX_LOGPROB_ENTRIES // 2
    prompt = SamplingParams(max_tokens=1, prompt_logprobs=1)
    assert refused(check_logprobs, prompt, LIMITS, fits) == ""
    assert "prompt_logprobs asks for 2 at each of" in refused(check_logprobs, prompt, LIMITS, fits + 1)
    everything = SamplingParams(max_tokens=1, prompt_logprobs=-1)
    assert refused(check_logprobs, everything, LIMITS, MAX_LOGPROB_ENTRIES // 51) == ""
    assert "asks for 51 at each" in refused(check_logprobs, everything, LIMITS, MAX_LOGPROB_ENTRIES // 51 + 1)
    assert refused(check_logprobs, SamplingParams(), LIMITS, 1 << 30) == ""


def test_the_gate_counts_log_probabilities() -> None:
    large = Limits(
        vocab_size=50, max_model_len=1 << 20, max_input_length=1 << 20, max_logprobs=20, max_n=4,
        max_num_blocks=1 << 20, block_size=8,
    )  # fmt: skip
    for max_tokens, error in ((1 << 16, ""), (1 << 17, "logprobs asks for 21 at each of 131072 positions")):
        params = SamplingParams(max_tokens=max_tokens, logprobs=20).resolved(GenerationDefaults(), max_tokens=16)
        message = AddRequest(RequestHeader("r", "g0"), params, pack_tokens([1, 2]), [0])
        assert refused(check_request, message, [1, 2], large, 0.0).startswith(error)


def intake(*sizes: Any, **policy: Any) -> RequestIntake:
    world = World(workers=0)
    for number, size in enumerate(sizes):
        world.join(f"w{number}", size)
    made = RequestIntake(Policy(**policy), world.scheduler.replicas)
    made.limit()
    return made


def test_the_limits_are_those_of_the_smallest_worker_and_of_the_settings() -> None:
    small, large = capacity(num_blocks=16, block_size=8, max_model_len=96), capacity(num_blocks=64, max_model_len=128)
    assert (intake().max_model_len, intake().max_input_length, intake().capacity) == (0, 0, None)
    both = intake(large, small)
    assert both.capacity is not None and both.capacity.num_blocks == 16
    assert (both.max_model_len, both.max_input_length) == (96, 95)
    assert intake(large, max_model_len=100).max_model_len == 100
    assert intake(large, max_model_len=200).max_model_len == 128
    assert intake(large, max_input_length=40).max_input_length == 40
    assert intake(large, max_input_length=400).max_input_length == 127
    whole = intake(large, enable_chunked_prefill=False, max_num_batched_tokens=50)
    assert whole.max_input_length == 50, "a prompt is computed in one step"
    assert intake(large, enable_chunked_prefill=False).max_input_length == 127
