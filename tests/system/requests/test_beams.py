"""Beam search and embeddings through real services, asked for with the official client and with ours."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from shared.client import CallError, Client
from tests.system.harness import Troupe, troupe

MODEL = "pageant-stories"
PROMPT = "Once upon a time there was a little"
TEXTS = ["One day a fox", "The end", "One day a fox"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troupe]:
    with troupe(tmp_path_factory.mktemp("beams"), "--num-blocks", "256", "--num-threads", "1") as started:
        yield started


@pytest.fixture(scope="module")
def client(running: Troupe) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def search(client: openai.OpenAI, **more: Any) -> Any:
    known = ("n", "stop", "temperature")
    given: dict[str, Any] = {"max_tokens": 16, "logprobs": 0} | {name: more.pop(name) for name in known if name in more}
    given["extra_body"] = {"use_beam_search": True} | more
    return client.completions.create(model=MODEL, prompt=PROMPT, **given)


def total(choice: Any) -> float:
    """Log-probability of a whole sequence."""
    scores: list[float] = choice.logprobs.token_logprobs
    return sum(scores)


def test_a_search_finds_likelier_sequences_than_greed(client: openai.OpenAI) -> None:
    (greedy,) = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0, logprobs=0, extra_body={"ignore_eos": True}
    ).choices
    (narrow,) = search(client, beam_width=1, ignore_eos=True).choices
    assert narrow.text == greedy.text
    wide = search(client, beam_width=6, n=3, ignore_eos=True)
    scores = [total(choice) for choice in wide.choices]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > total(greedy)
    assert len({choice.text for choice in wide.choices}) == 3
    assert wide.usage.completion_tokens == 3 * 16


def test_both_fronts_find_the_same(client: openai.OpenAI, running: Troupe) -> None:
    async def ask() -> list[str]:
        async with Client(running.address) as ours:
            beam = {"width": 4, "length_penalty": 0.5}
            answer = await ours.generate(PROMPT, max_tokens=16, n=2, beam_search=beam)
            return [sequence.text for sequence in answer.sequences]

    choices = search(client, beam_width=4, length_penalty=0.5, n=2).choices
    assert asyncio.run(ask()) == [choice.text for choice in choices]


def test_a_chat_can_be_searched(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "A story about a fox"}], max_tokens=12, n=2,
        extra_body={"use_beam_search": True, "beam_width": 3},
    )  # fmt: skip
    first, second = (choice.message.content for choice in answer.choices)
    assert first and second and first != second


@pytest.mark.parametrize(
    ("field", "more"),
    [("temperature", {"temperature": 0.5}), ("stop", {"stop": ["x"]}), ("n", {"n": 3, "beam_width": 2}),
     ("beam_width", {"beam_width": 65}), ("length_penalty", {"length_penalty": 99}),
     ("guided_regex", {"guided_regex": "[ab]+"})],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(client: openai.OpenAI, field: str, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        search(client, **more)
    assert refused.value.param == field


def test_vectors_are_the_same_by_every_way(client: openai.OpenAI, running: Troupe) -> None:
    """The official client asks for base64 unless it is told otherwise."""
    packed = client.embeddings.create(model=MODEL, input=TEXTS)
    plain = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert [one.embedding for one in packed.data] == [one.embedding for one in plain.data]
    one, other, again = (one.embedding for one in plain.data)
    assert one == again != other
    assert math.hypot(*one) == pytest.approx(1, abs=1e-5)

    async def ask() -> list[list[float]]:
        async with Client(running.address) as ours:
            return await ours.embed([TEXTS[0], await ours.tokenize(TEXTS[1])])

    assert asyncio.run(ask()) == [one, other]


def test_a_mean_is_another_vector_and_says_what_it_took(client: openai.OpenAI) -> None:
    last = client.embeddings.create(model=MODEL, input=PROMPT, encoding_format="float")
    mean = client.embeddings.create(
        model=MODEL, input=PROMPT, encoding_format="float", extra_body={"pooling": "mean", "normalize": False}
    )
    assert last.data[0].embedding != mean.data[0].embedding
    assert math.hypot(*mean.data[0].embedding) != pytest.approx(1, abs=1e-3)
    count = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).usage
    assert count is not None
    assert last.usage.prompt_tokens == last.usage.total_tokens == count.prompt_tokens


def test_what_is_too_long_is_refused(client: openai.OpenAI, running: Troupe) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=MODEL, input=[[5], [5] * 5000])
    assert refused.value.param == "input" and refused.value.code == "context_length_exceeded"

    async def ask() -> None:
        async with Client(running.address) as ours:
            await ours.embed([])

    with pytest.raises(CallError) as failed:
        asyncio.run(ask())
    assert failed.value.field == "input"
    assert running.settled_load().num_running == 0
