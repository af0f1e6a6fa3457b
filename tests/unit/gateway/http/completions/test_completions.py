"""/v1/completions over a real HTTP server: what is asked of the troupe, and what the client gets of its words."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import RejectCode
from shared.messages import AbortRequest, FinishReason, RequestRejected, TokenizeRequest, TokenLogprobs
from shared.packing import unpack_tokens
from tests.unit.gateway.http.client import events, http, streaming
from tests.unit.gateway.troupe import LAST, until

ASK: dict[str, Any] = {"prompt": "Once", "max_tokens": 4}


async def test_every_field_reaches_the_troupe() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": 0.2,
        "repetition_penalty": 1.1, "min_tokens": 2, "max_tokens": 9, "ignore_eos": True, "seed": 5, "n": 2,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "allowed_token_ids": [1, 2],
        "bad_words": ["cat"], "stop_token_ids": [4], "speculate": False,
    }  # fmt: skip
    async with http() as h:
        body = ASK | given | {"stop": "x", "logit_bias": {"3": 200}, "priority": 3, "request_id": "mine", "user": "u"}
        asked = h.post("/v1/completions", body, **{"x-tenant": "acme"})
        request = await h.troupe.request()
        for name, value in given.items():
            assert getattr(request.params, name) == value, name
        assert request.params.stop == ["x"] and request.params.logit_bias == {3: 100.0}
        assert (request.header.tenant, request.header.label, request.header.priority) == ("acme", "mine", 3)
        for index in (0, 1):
            h.troupe.say(request, "upon a", index=index, **LAST)
        assert (await asked).headers["x-request-id"] == request.header.request_id


async def test_a_whole_answer() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", ASK | {"stop": ["2"]})
        request = await h.troupe.request()
        assert request.params.seed is not None and request.params.temperature is None
        h.troupe.say(request, "upon a", num_prompt_tokens=3)
        h.troupe.say(request, " time", at=(2, 6), num_output_tokens=3, **LAST)
        response = await asked
        answer = response.json()
        assert response.status_code == 200 and answer["object"] == "text_completion" and answer["model"] == "tiny"
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("upon a time", "stop", "2")
        usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 1}}
        assert (await h.troupe.asked(AbortRequest))[1].reason == "finished"


async def test_a_streamed_answer_with_usage() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", streaming(ASK | {"stream_options": {"include_usage": True}}))
        request = await h.troupe.request()
        h.troupe.say(request, "upon a", num_prompt_tokens=3)
        h.troupe.say(request, " time", at=(2, 6), **LAST)
        response = await asked
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(response.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "upon a time"
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
        assert len({chunk["id"] for chunk in (*chunks, last)}) == 1


async def test_usage_in_every_event() -> None:
    async with http() as h:
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = h.post("/v1/completions", streaming(ASK | {"stream_options": options}))
        request = await h.troupe.request()
        h.troupe.say(request, "upon a", num_prompt_tokens=3)
        h.troupe.say(request, " time", at=(2, 6), **LAST)
        counts = [chunk["usage"]["completion_tokens"] for chunk in events((await asked).text)]
        assert counts == sorted(counts) and counts[-1] == 3


PROMPTS = [
    ("one", [("one", None)]),
    ([5, 6], [(None, [5, 6])]),
    (["one", "two"], [("one", None), ("two", None)]),
    ([[5], [6, 7]], [(None, [5]), (None, [6, 7])]),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "wanted"), PROMPTS, ids=range(len(PROMPTS)))
async def test_prompts_of_every_kind(prompt: Any, wanted: list[Any]) -> None:
    async with http() as h:
        asked = h.post("/v1/completions", ASK | {"prompt": prompt})
        requests = [await h.troupe.request() for _ in wanted]
        found = {(r.text, tuple(unpack_tokens(r.token_ids)) if r.token_ids else None) for r in requests}
        assert found == {(text, tuple(ids) if ids else None) for text, ids in wanted}
        for request in requests:
            h.troupe.say(request, f"after {request.text or unpack_tokens(request.token_ids or b'')}", **LAST)
        choices = (await asked).json()["choices"]
        assert [choice["text"] for choice in choices] == [f"after {text or ids}" for text, ids in wanted]
        assert [choice["index"] for choice in choices] == list(range(len(wanted)))


async def test_the_sequences_of_several_prompts_stream_together() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", streaming(ASK | {"prompt": ["a", "b"], "n": 2}))
        requests = sorted([await h.troupe.request(), await h.troupe.request()], key=lambda request: request.text or "")
        for request in requests:
            for index in (1, 0):
                h.troupe.say(request, f"{request.text} {index}", index=index, **LAST)
        texts = {chunk["choices"][0]["index"]: chunk["choices"][0]["text"] for chunk in events((await asked).text)}
        assert texts == {0: "a 0", 1: "a 1", 2: "b 0", 3: "b 1"}


async def test_of_several_prompts_the_first_failure_ends_all() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", ASK | {"prompt": ["a", "b"]})
        first, second = await h.troupe.request(), await h.troupe.request()
        h.troupe.tell(RequestRejected(first.header.request_id, RejectCode.INVALID_ARGUMENT, "n is bad", "n"))
        assert (await asked).status_code == 400
        assert (await h.troupe.asked(AbortRequest))[1].request_id == second.header.request_id
        await until(lambda: not len(h.troupe.gateway.generation.journal))


async def test_best_of_gives_the_likeliest_first() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", ASK | {"best_of": 3, "n": 2})
        request = await h.troupe.request()
        assert (request.params.n, request.params.logprobs) == (3, 0)
        for index, logprob in enumerate((-2.0, -0.5, -1.0)):
            h.troupe.say(request, f"w{index}", index=index, logprobs=[TokenLogprobs([5], [logprob], 1)], **LAST)
        choices = (await asked).json()["choices"]
        assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in choices] == [
            (0, "w1", None), (1, "w2", None),
        ]  # fmt: skip


async def test_logprobs_in_columns_and_tokens_asked_for_once() -> None:
    async with http() as h:
        for number in range(2):
            asked = h.post("/v1/completions", ASK | {"logprobs": 2})
            request = await h.troupe.request()
            entries = [
                TokenLogprobs([255, 6, 7], [-0.5, -0.25, float("-inf")], 2),
                TokenLogprobs([6, 6, 7], [-1, -1, -2], 1),
            ]
            h.troupe.say(request, "a b", token_ids=[255, 6], logprobs=entries, **LAST)
            if number == 0:
                assert set(await h.answer_pieces()) == {6, 7, 255}
            columns = (await asked).json()["choices"][0]["logprobs"]
            assert columns["tokens"] == ["bytes:\\xf0\\x9f", "t6"]
            assert columns["token_logprobs"] == [-0.5, -1]
            own, other = columns["top_logprobs"]
            assert list(own.items()) == [("bytes:\\xf0\\x9f", -0.5), ("t6", -0.25), ("t7", -9999)], "its own first"
            assert other == {"t6": -1, "t7": -2}
            assert columns["text_offset"] == [0, len("bytes:\\xf0\\x9f")]


@pytest.mark.parametrize(("given", "name"), [(None, "token_id:6"), (False, "t6")])
async def test_the_server_may_name_tokens_by_their_ids(given: bool | None, name: str) -> None:
    async with http(return_tokens_as_token_ids=True) as h:
        asked = h.post("/v1/completions", ASK | {"logprobs": 0, "return_tokens_as_token_ids": given})
        request = await h.troupe.request()
        h.troupe.say(request, "a", token_ids=[6], logprobs=[TokenLogprobs([6], [-1], 1)], **LAST)
        if given is False:
            await h.answer_pieces()
        assert (await asked).json()["choices"][0]["logprobs"]["tokens"] == [name]


async def test_echo_with_logprobs_of_the_prompt() -> None:
    async with http() as h:
        asked = h.post("/v1/completions", ASK | {"prompt": "t1t2", "echo": True, "logprobs": 1, "max_tokens": 0})
        await h.answer_encode([9, 1, 2])
        request = await h.troupe.request()
        assert unpack_tokens(request.token_ids or b"") == [9, 1, 2]
        assert (request.params.max_tokens, request.params.logprobs, request.params.prompt_logprobs) == (1, 1, 1)
        entry = TokenLogprobs([1, 1], [-0.5, -0.5], 1)
        told: dict[str, Any] = {
            "prompt_logprobs": [None, entry, entry],
            "logprobs": [entry],
            "finish_reason": FinishReason.LENGTH,
        }
        h.troupe.say(request, "hidden", token_ids=[1], num_prompt_tokens=3, **told)
        await h.answer_pieces()
        (choice,) = (await asked).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("t1t2", "length")
        assert choice["logprobs"]["tokens"] == ["t9", "t1", "t2"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert choice["logprobs"]["text_offset"] == [0, 0, 2], "a token that the text does not show has no room in it"


async def test_token_ids_and_prompt_logprobs() -> None:
    async with http() as h:
        more = {"return_token_ids": True, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
        asked = h.post("/v1/completions", ASK | more)
        await h.answer_encode([3, 4])
        request = await h.troupe.request()
        h.troupe.say(request, "a b", prompt_logprobs=[None, TokenLogprobs([4, 8], [-1.5, -0.5], 2)], **LAST)
        (choice,) = (await asked).json()["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == ([3, 4], [0, 1])
        assert choice["prompt_logprobs"] == [
            None,
            {"4": {"logprob": -1.5, "rank": 2, "decoded_token": "token_id:4"},
             "8": {"logprob": -0.5, "rank": 1, "decoded_token": "token_id:8"}},
        ]  # fmt: skip


async def test_a_client_that_goes_away_aborts_its_request() -> None:
    async with http() as h:
        for body in (ASK, streaming(ASK)):
            asked = h.post("/v1/completions", body)
            name, request = await h.troupe.asked(TokenizeRequest)
            h.troupe.say(request, "some")
            await h.troupe.sent(request)
            asked.cancel()
            where, abort = await h.troupe.asked(AbortRequest)
            assert (where, abort.request_id, abort.reason) == (name, request.header.request_id, "cancelled")
            await until(lambda: not len(h.troupe.gateway.generation.journal))


async def test_prompt_logprobs_come_with_the_first_event() -> None:
    async with http() as h:
        more = {"prompt_logprobs": 1, "return_tokens_as_token_ids": True}
        asked = h.post("/v1/completions", streaming(ASK | more))
        await h.answer_encode([3, 4])
        request = await h.troupe.request()
        h.troupe.say(request, "a b", prompt_logprobs=[None, TokenLogprobs([4, 8], [-1.5, -0.5], 2)])
        await h.troupe.sent(request)
        h.troupe.say(request, " c", at=(2, 3), **LAST)
        chunks = [chunk["choices"][0] for chunk in events((await asked).text)]
        assert len(chunks) > 1 and chunks[0]["prompt_logprobs"][0] is None
        assert chunks[0]["prompt_logprobs"][1]["4"] == {"logprob": -1.5, "rank": 2, "decoded_token": "token_id:4"}
        assert all("prompt_logprobs" not in chunk for chunk in chunks[1:])
