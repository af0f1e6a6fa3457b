"""Log-probabilities beside the likeliest ones: of tokens that a request names, of all tokens, of a response's text; and
prompts that come as token ids."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from shared.errors import RequestError
from shared.messages import TokenLogprobs
from shared.packing import unpack_tokens
from shared.requests.sampling import Limits, SamplingParams, check_sampling
from tests.unit.gateway.http.client import Http, events, http
from tests.unit.gateway.troupe import LAST

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
NAMED: dict[str, Any] = {"logprob_token_ids": [9, 5, 9], "return_tokens_as_token_ids": True}
LIMITS = Limits(vocab_size=1000, max_model_len=512, max_input_length=500)


@pytest.mark.parametrize("sampled", [7, 5])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_tells_of_the_tokens_that_it_names(sampled: int, stream: bool) -> None:
    async with http() as h:
        asked = h.post("/v1/chat/completions", CHAT | NAMED | {"logprobs": True, "top_logprobs": 1, "stream": stream})
        request = await h.troupe.request()
        assert (request.params.logprob_token_ids, request.params.logprobs) == ([9, 5], 2), "each once"
        entry = TokenLogprobs([sampled, 9, 5], [-1.0, -2.0, -1.0], 1)
        h.troupe.say(request, "a", token_ids=[sampled], logprobs=[entry], **LAST)
        response = await asked
        choices = [one["choices"][0] for one in (events(response.text) if stream else [response.json()])]
        (told,) = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
        names = [one["token"] for one in told["top_logprobs"]]
        assert names == [f"token_id:{one}" for one in dict.fromkeys([sampled, 9, 5])], "the token itself comes first"


async def test_a_completion_tells_of_the_tokens_that_it_names() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", {"prompt": "a", "logprobs": 0} | NAMED)
        request = await h.troupe.request()
        assert (request.params.logprob_token_ids, request.params.logprobs) == ([9, 5], 2)
        entry = TokenLogprobs([7, 9, 5], [-1.0, -2.0, -3.0], 1)
        h.troupe.say(request, "a", token_ids=[7], logprobs=[entry], **LAST)
        (found,) = (await asked).json()["choices"][0]["logprobs"]["top_logprobs"]
        assert found == {"token_id:7": -1.0, "token_id:9": -2.0, "token_id:5": -3.0}


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"logprobs": False}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True, "max_tokens": 0}),
])  # fmt: skip
async def test_tokens_are_named_where_log_probabilities_are_told(path: str, body: dict[str, Any]) -> None:
    async with http() as h:
        status, error = await h.refusal(path, body | NAMED)
        assert (status, error["param"]) == (400, "logprob_token_ids")


@pytest.mark.parametrize("params", [
    SamplingParams(logprob_token_ids=[1000], logprobs=1),
    SamplingParams(logprob_token_ids=list(range(21)), logprobs=21),
    SamplingParams(logprob_token_ids=[1, 2], logprobs=1),
])  # fmt: skip
def test_named_tokens_have_limits(params: SamplingParams) -> None:
    with pytest.raises(RequestError, match="logprob_token_ids") as refused:
        check_sampling(params, LIMITS, 1)
    assert refused.value.field == "logprob_token_ids"


async def test_a_chat_tells_of_the_whole_vocabulary() -> None:
    async with http() as h:
        asked = h.post("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": -1})
        request = await h.troupe.request()
        h.troupe.say(request, "a", token_ids=[7], logprobs=[TokenLogprobs([7, 8, 7], [-2.0, -1.0, -2.0], 2)], **LAST)
        await h.answer_pieces()
        (told,) = (await asked).json()["choices"][0]["logprobs"]["content"]
        assert [one["token"] for one in told["top_logprobs"]] == ["t8", "t7"]


async def test_a_chat_s_prompt_may_come_as_token_ids() -> None:
    async with http() as h:
        given = {"kv_transfer_params": {"prompt_token_ids": [4, 5]}, "return_token_ids": True}
        asked = h.post("/v1/chat/completions", CHAT | given)
        request = await h.troupe.request()
        assert unpack_tokens(request.token_ids or b"") == [4, 5] and request.params.max_tokens == 512 - 2
        h.troupe.say(request, "a", **LAST)
        assert (await asked).json()["prompt_token_ids"] == [4, 5]
        for params in ({"prompt_token_ids": [4], "do_remote_prefill": True}, {"prompt_token_ids": ["a"]}):
            status, error = await h.refusal("/v1/chat/completions", CHAT | {"kv_transfer_params": params})
            assert status == 400 and error["param"].startswith("kv_transfer_params")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_s_text_has_log_probabilities(stream: bool) -> None:
    """Its reasoning has none, nor have tokens that show nothing."""
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    pieces = ["<think>", "t1", "</think>", "\n\n", "t4", "t5", ""]  # of tokens 0 to 6
    async with http(reasoning_parser="qwen3") as h:
        answering = asyncio.create_task(answer_all_pieces(h))
        asked = h.post("/v1/responses", {"input": "Hi", "stream": stream} | include)
        request = await h.troupe.request()
        assert request.params.logprobs == 1
        for place, text in enumerate(pieces):
            entry = TokenLogprobs([place, 9], [-1.0, -0.5], 2)
            end = LAST if place == len(pieces) - 1 else {}
            at = (place, sum(map(len, pieces[:place])))
            h.troupe.say(request, text, at=at, token_ids=[place], logprobs=[entry], **end)
        text = (await asked).text
        answering.cancel()
        told = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
        response = told[-1]["response"] if stream else json.loads(text)
        (part,) = response["output"][-1]["content"]
        assert part["text"] == "t4t5" and response["top_logprobs"] == 1
        assert [one["token"] for one in part["logprobs"]] == ["t4", "t5"]
        assert [one["token"] for one in part["logprobs"][0]["top_logprobs"]] == ["t9"]
        grown = [one["logprobs"] for one in told if one["type"] == "response.output_text.delta"]
        assert not stream or [one for few in grown for one in few] == part["logprobs"]


async def answer_all_pieces(h: Http) -> None:
    while True:
        await h.answer_pieces()


async def test_top_logprobs_of_a_response_need_to_be_included() -> None:
    async with http() as h:
        status, error = await h.refusal("/v1/responses", {"input": "Hi", "top_logprobs": 1})
        assert (status, error["param"]) == (400, "top_logprobs")


TOLD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
    ("/v1/completions", {"prompt": "a", "logprobs": 1}),
]


@pytest.mark.parametrize(("path", "body"), TOLD)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_that_another_life_of_the_scheduler_computed_has_a_name_and_no_log_probability(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    """As a client is sent it that returns to a gateway that has not served the answer before."""
    async with http() as h:
        asked = h.post(path, body | {"stream": stream})
        request = await h.troupe.request()
        entries = [None, TokenLogprobs([8, 9], [-1.0, -2.0], 1)]
        h.troupe.say(request, "t7 t8", token_ids=[7, 8], logprobs=entries, **LAST)
        assert set(await h.answer_pieces()) == {7, 8, 9}
        response = await asked
        assert response.status_code == 200
        told = [one["choices"][0]["logprobs"] for one in (events(response.text) if stream else [response.json()])]
        (found,) = [one for one in told if one]
        if "content" in found:
            assert [(one["token"], one["logprob"]) for one in found["content"]] == [("t7", -9999.0), ("t8", -1.0)]
        else:
            assert (found["tokens"], found["token_logprobs"]) == (["t7", "t8"], [None, -1.0])
