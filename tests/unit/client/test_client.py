"""The Python client against a real gateway whose troupe is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shared.client import CallError, Client
from shared.errors import RejectCode
from shared.messages import (
    AbortRequest,
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
    EncodeResult,
    RequestRejected,
    TokenLogprobs,
)
from shared.packing import pack_tokens, unpack_tokens
from shared.tracing.latency import LatencyTracker
from shared.tracing.phases import NUM_MISSES, Miss, Phase
from tests.unit.gateway.troupe import LAST, FakeTroupe, front, until


@asynccontextmanager
async def connected(client: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[tuple[FakeTroupe, Client]]:
    async with (
        front(**settings) as running,
        Client(f"127.0.0.1:{running.troupe.gateway.server.port}", **(client or {})) as made,
    ):
        yield running.troupe, made


async def test_a_whole_generation() -> None:
    async with connected() as (troupe, client):
        asked = asyncio.create_task(
            client.generate(
                "Once",
                n=2,
                max_tokens=4,
                stop="x",
                logprobs=1,
                allowed_token_ids=[1],
                logit_bias={3: 1.5},
                label="mine",
            )
        )
        request = await troupe.request()
        params = request.params
        assert (request.text, params.n, params.max_tokens, params.stop) == ("Once", 2, 4, ["x"])
        assert (params.allowed_token_ids, params.logit_bias, request.header.label) == ([1], {3: 1.5}, "mine")
        entry = TokenLogprobs([0, 6], [-0.5, -0.25], 2)
        troupe.say(request, "upon", index=0, logprobs=[entry])
        troupe.say(request, "other", index=1, **LAST)
        troupe.say(request, " a", at=(1, 4), index=0, logprobs=[entry], num_output_tokens=2, **LAST)
        answer = await asked
        assert answer.request_id == request.header.request_id
        assert [sequence.text for sequence in answer.sequences] == ["upon a", "other"]
        assert (answer.text, answer.usage.prompt_tokens, answer.usage.completion_tokens) == ("upon a", 3, 2)
        first = answer.sequences[0]
        assert (first.finish_reason, first.stop_reason, len(first.logprobs)) == ("stop", "2", 2)
        assert first.logprobs[0] is not None and first.logprobs[0].top[0].token_id == 6


async def test_a_stream_that_is_left_is_aborted() -> None:
    async with connected() as (troupe, client):
        async with client.stream(chat=[("user", "Hi")], seed=3) as stream:
            request = await troupe.request()
            assert request.chat is not None and request.chat[0].content == "Hi" and request.params.seed == 3
            troupe.say(request, "some")
            delta = await anext(stream)
            assert (delta.index, delta.text, delta.finish_reason) == (0, "some", "")
            assert await stream.request_id() == request.header.request_id
        assert (await troupe.asked(AbortRequest))[1].request_id == request.header.request_id
        await until(lambda: not len(troupe.gateway.generation.journal))


async def test_token_ids_in_and_out() -> None:
    async with connected() as (troupe, client):
        asked = asyncio.create_task(client.generate(token_ids=[5, 6], return_token_ids=True))
        request = await troupe.request()
        assert unpack_tokens(request.token_ids or b"") == [5, 6]
        troupe.say(request, "a b c", **LAST)
        assert (await asked).sequences[0].token_ids == [0, 1, 2]


async def test_who_asks_is_told_where_the_time_went() -> None:
    async with connected() as (troupe, client):
        for explain in (True, False):
            asked = asyncio.create_task(client.generate("Once", explain=explain))
            request = await troupe.request()
            assert request.latency is not None
            misses = [0] * NUM_MISSES
            misses[Miss.EVICTED] = 3
            tracker = LatencyTracker(Phase.DECODE, request.latency.stamp, request.latency)
            tracker.num_ahead, tracker.misses, tracker.evicted_ago = 5, misses, 70
            troupe.say(request, "upon", latency=tracker.breakdown(request.latency.stamp), **LAST)
            told = (await asked).explanation
            if not explain:
                assert told is None
                continue
            assert told is not None and "gateway" in told.phases and all(ms > 0 for ms in told.phases.values())
            assert (told.num_ahead, told.misses, told.evicted_ago_ms) == (5, {"evicted": 3}, 70)
            assert told.cause


async def test_errors_name_field_and_time() -> None:
    async with connected() as (troupe, client):
        asked = asyncio.create_task(client.generate("x"))
        request = await troupe.request()
        troupe.tell(RequestRejected(request.header.request_id, RejectCode.RESOURCE_EXHAUSTED, "too much", "n", 250))
        with pytest.raises(CallError) as caught:
            await asked
        assert (caught.value.code, caught.value.field, caught.value.retry_after) == ("RESOURCE_EXHAUSTED", "n", 0.25)
        with pytest.raises(CallError) as caught:
            await client.generate("x", timeout=0.05)
        assert caught.value.code == "DEADLINE_EXCEEDED"
        with pytest.raises(ValueError, match="no_such_thing"):
            await client.generate("x", no_such_thing=1)


async def test_keys() -> None:
    async with connected(api_keys="acme:correct-horse") as (_, client):
        with pytest.raises(CallError) as caught:
            await client.models()
        assert caught.value.code == "UNAUTHENTICATED"
    async with connected({"api_key": "correct-horse"}, api_keys="acme:correct-horse") as (_, client):
        (model,) = await client.models()
        assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", 512, 1000)


async def test_the_tokenizer_by_itself() -> None:
    async with connected({"tenant": "acme"}) as (troupe, client):
        asked = asyncio.create_task(client.tokenize("Hi", special=False))
        _, encode = await troupe.asked(EncodeRequest)
        assert encode.text == "Hi" and not encode.add_special_tokens
        troupe.tell(EncodeResult(encode.request_id, pack_tokens([4, 5])))
        assert await asked == [4, 5]
        text = asyncio.create_task(client.detokenize([4, 5], skip_special_tokens=False))
        _, decode = await troupe.asked(DecodeRequest)
        assert not decode.skip_special_tokens
        troupe.tell(DecodeResult(decode.request_id, "Hi"))
        assert await text == "Hi"


@pytest.mark.parametrize("closes", [False, True], ids=["the stream is cancelled", "the client is closed"])
async def test_a_task_that_reads_what_is_cancelled_meanwhile_is_not_cancelled_itself(closes: bool) -> None:
    async with connected() as (troupe, client):
        stream = client.stream("x")
        reading = asyncio.create_task(anext(stream))
        await troupe.request()
        if closes:
            await client.close()
        else:
            stream.cancel()
        with pytest.raises(CallError) as caught:
            await reading
        assert caught.value.code == "CANCELLED"


async def test_a_task_that_is_cancelled_while_it_reads_ends_as_one() -> None:
    async with connected() as (troupe, client):
        reading = asyncio.create_task(anext(client.stream("x")))
        await troupe.request()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert reading.cancelled()
