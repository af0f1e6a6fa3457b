"""What the gateway does for its streams when a service is lost: they pause, and are asked again where they stand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos.pageant.v1.inference_pb2 import GenerateRequest, GenerateResponse
from services.gateway.streams.recovery import PATIENCE, SilenceWatchdog
from services.gateway.streams.stream import Stream
from shared.errors import RejectCode
from shared.messages import (
    AbortRequest,
    AttachRequest,
    EncodeRequest,
    EncodeResult,
    RequestHeader,
    RequestRejected,
    SequenceText,
    ServiceName,
    StreamLost,
    TokenizeRequest,
)
from shared.packing import pack_tokens, unpack_tokens
from shared.requests.sampling import GenerationDefaults, SamplingParams
from tests.unit.gateway.troupe import LAST, Front, failure, front, without_latency

NEEDED = [ServiceName.TOKENIZER, ServiceName.WORKER, ServiceName.DETOKENIZER]


def ask(**sampling: Any) -> Any:
    return GenerateRequest(text="Once", sampling=sampling, stream={"return_token_ids": True})


async def rest(call: Any) -> list[GenerateResponse]:
    responses = []
    while isinstance(response := await call.read(), GenerateResponse):
        responses.append(response)
    return responses


def replace_scheduler(f: Front) -> None:
    f.troupe.epoch += 1
    f.troupe.announce()


async def test_a_new_scheduler_is_asked_to_go_on_behind_what_was_sent() -> None:
    async with front() as f:
        call = f.inference.Generate(ask(n=2, temperature=0.5))
        request = await f.troupe.request()
        assert not request.is_resumed and not request.sent_token_ids
        f.troupe.say(request, "one two", index=0, num_cached_tokens=2)
        f.troupe.say(request, "whole", index=1, **LAST)
        responses = [await call.read(), await call.read()]
        replace_scheduler(f)
        again = await f.troupe.request()
        assert (again.header, again.params, again.text) == (request.header, request.params, request.text)
        assert again.params.seed is not None, "the seed was drawn once"
        assert again.is_resumed and again.sent_finished == [False, True]
        assert [unpack_tokens(packed) for packed in again.sent_token_ids] == [[0, 1], []]
        f.troupe.say(request, "one two three", index=0, **(LAST | {"num_cached_tokens": 0}))
        responses += await rest(call)
        assert "".join(r.text for r in responses if r.index == 0) == "one two three"
        assert [token for r in responses if r.index == 0 for token in r.token_ids] == [0, 1, 2]
        (end,) = [r for r in responses if r.index == 0 and r.finish_reason]
        assert end.usage.cached_tokens == 2, "as it was when the request was new"
        assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_waits_until_the_new_scheduler_has_everybody() -> None:
    async with front() as f:
        call = f.inference.Generate(ask())
        await f.troupe.request()
        f.troupe.epoch = 2
        for service in NEEDED:
            f.troupe.announce(service)
        await asyncio.sleep(0.1)
        assert not f.troupe.seen.get("memory://tokenizer-a") and not f.troupe.seen.get("memory://tokenizer-b")
        f.troupe.announce()
        again = await f.troupe.request()
        f.troupe.say(again, "there", **LAST)
        assert [response.text for response in await rest(call)] == ["there"]


async def test_who_was_taken_for_lost_asks_for_everything_again() -> None:
    async with front() as f:
        call = f.inference.Generate(ask())
        request = await f.troupe.request()
        f.troupe.say(request, "a")
        await call.read()
        f.troupe.announce("gateway-test")
        again = await f.troupe.request()
        assert again.is_resumed and unpack_tokens(again.sent_token_ids[0]) == [0]
        call.cancel()


async def test_a_gateway_that_is_reached_elsewhere_says_so_of_its_streams() -> None:
    async with front() as f:
        call = f.inference.Generate(ask())
        request = await f.troupe.request()
        f.troupe.say(request, "a")
        await call.read()
        inbox = f.troupe.gateway.inbox
        f.troupe.network.inboxes["memory://elsewhere"] = f.troupe.network.inboxes.pop(inbox.address)
        inbox.address = "memory://elsewhere"
        f.troupe.gateway._move()
        f.troupe.announce()
        again = await f.troupe.request()
        assert again.header.gateway == "memory://elsewhere" != request.header.gateway
        assert again.is_resumed and unpack_tokens(again.sent_token_ids[0]) == [0]
        f.troupe.say(again, "a b", **LAST)
        assert [response.text for response in await rest(call)] == [" b"]
        assert await call.code() is grpc.StatusCode.OK


async def test_unavailable_elsewhere_is_asked_again_with_the_next_roster() -> None:
    async with front() as f:
        call = f.inference.Generate(ask())
        request = await f.troupe.request()
        f.troupe.tell(RequestRejected(request.header.request_id, RejectCode.UNAVAILABLE, "no worker is ready"))
        f.troupe.announce()
        again = await f.troupe.request()
        assert without_latency(again) == without_latency(request)
        f.troupe.say(again, "there", **LAST)
        assert [response.text for response in await rest(call)] == ["there"]


@pytest.mark.parametrize("service", NEEDED)
async def test_a_request_waits_for_a_service_that_was_just_there(service: ServiceName) -> None:
    async with front() as f:
        f.troupe.announce(service)
        call = f.inference.Generate(ask())
        await asyncio.sleep(0.05)
        assert not call.done()
        f.troupe.announce()
        f.troupe.say(await f.troupe.request(), "there", **LAST)
        assert [response.text for response in await rest(call)] == ["there"]


@pytest.mark.parametrize("service", NEEDED)
async def test_nobody_waits_for_ever(service: ServiceName) -> None:
    async with front(resume_timeout=0.2) as f:
        begun = f.inference.Generate(ask())
        f.troupe.say(await f.troupe.request(), "a")
        f.troupe.announce(service)
        f.troupe.epoch = 2
        async with heard_of_the_scheduler(f, service):
            new = f.inference.Generate(ask())
            for error in (await failure(begun), await failure(new)):
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert error.details() == f"no {service} is live"


@contextlib.asynccontextmanager
async def heard_of_the_scheduler(f: Front, *without: str) -> AsyncIterator[None]:
    """It goes on sending rosters, whichever actors are missing."""

    async def announce() -> None:
        while True:
            f.troupe.announce(*without)
            await asyncio.sleep(0.02)

    announcing = asyncio.create_task(announce())
    await asyncio.sleep(0)
    yield
    announcing.cancel()


async def test_a_scheduler_that_stays_away_ends_open_streams() -> None:
    async with front(heartbeat_timeout=0.1, resume_timeout=0.3) as f:
        call = f.inference.Generate(ask())
        await f.troupe.request()
        async with asyncio.timeout(30):
            error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "lost" in error.details()


async def test_a_question_waits_for_a_tokenizer_too() -> None:
    async with front() as f:
        question = asyncio.create_task(
            f.troupe.gateway.generation.questions.ask_tokenizer(EncodeRequest("q", "g", text="x"), 5)
        )
        await f.troupe.asked(EncodeRequest)
        f.troupe.announce(ServiceName.TOKENIZER)
        f.troupe.announce()
        _, again = await f.troupe.asked(EncodeRequest)
        f.troupe.tell(EncodeResult(again.request_id, pack_tokens([4])))
        assert (await question) == EncodeResult("q", pack_tokens([4]))


async def test_a_silent_stream_is_asked_after() -> None:
    async with front() as f:
        f.troupe.gateway.generation.recovery.watchdog = SilenceWatchdog(patience=0.1)
        call = f.inference.Generate(ask())
        first = await f.troupe.request()
        lost = await f.troupe.get(f.troupe.scheduler, StreamLost)
        again = await f.troupe.request()
        assert lost.request_id == first.header.request_id == again.header.request_id and again.is_resumed
        f.troupe.say(again, "there", **LAST)
        assert [response.text for response in await rest(call)] == ["there"]


def test_patience_with_a_silent_stream_doubles_and_progress_renews_it() -> None:
    stream = Stream(TokenizeRequest(RequestHeader("r", "g"), SamplingParams(), text="x"), "t")
    watch = SilenceWatchdog()
    asked = [now for now in range(100) if watch.overdue([stream], now)]
    assert asked == [6, 17, 38, 79], "after a little more than 5, 10, 20 and 40 seconds"
    stream.accept(SequenceText("r", 0, 0, 0, "a", [1]))
    assert not watch.overdue([stream], 200)
    assert not watch.overdue([stream], 200 + PATIENCE)
    assert watch.overdue([stream], 201 + PATIENCE) == [stream]
    assert not watch.overdue([], 300) and not watch.overdue([stream], 301), "what was closed is forgotten"


def test_patience_is_longer_with_what_rests() -> None:
    header = RequestHeader("r", "g", is_background=True)
    stream = Stream(TokenizeRequest(header, SamplingParams(), text="x"), "t")
    watch = SilenceWatchdog()
    assert [now for now in range(400) if watch.overdue([stream], now)] == [61, 182], "after 60 and 120 seconds"


async def test_the_background_says_nothing_of_the_times_of_others_and_survives_a_scheduler() -> None:
    async with front() as f:
        generation, delivered = f.troupe.gateway.generation, asyncio.Event()

        async def deliver(stream: Stream) -> None:
            delivered.set()
            await asyncio.sleep(60)

        header = RequestHeader("0" * 32, f.troupe.gateway.address, tenant="t", is_background=True)
        request = TokenizeRequest(
            header, SamplingParams(max_tokens=8).resolved(GenerationDefaults(), max_tokens=8), text="x"
        )
        batch = asyncio.create_task(generation.generate(request, deliver))
        first = await f.troupe.request()
        assert first.header.is_background
        assert generation.forecasts.of("t").is_empty and len(generation.admission) == 0
        f.troupe.say(first, "one")
        await delivered.wait()
        replace_scheduler(f)
        again = await f.troupe.request()
        assert again.header.is_background and again.is_resumed
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)
        assert len(generation.journal) == 0


def kept(**fields: Any) -> Any:
    return GenerateRequest(text="Once", idempotency_key="k1", stream={"return_token_ids": True}, **fields)


async def test_a_key_fixes_id_and_seed_for_its_tenant() -> None:
    async with front() as f:
        requests = []
        for tenant, key in (("a", "k1"), ("a", "k1"), ("a", "k2"), ("b", "k1")):
            call = f.inference.Generate(
                GenerateRequest(text="x", idempotency_key=key), metadata=(("x-tenant", tenant),)
            )
            requests.append(await f.troupe.request())
            call.cancel()
            await f.troupe.asked(AbortRequest)
        first, same, *others = requests
        assert same.header.request_id == first.header.request_id and same.params.seed == first.params.seed
        assert first.header.is_kept and same.header.arrival_time > first.header.arrival_time
        for other in others:
            assert other.header.request_id != first.header.request_id and other.params.seed != first.params.seed


async def test_who_comes_back_gets_the_rest_from_where_they_say() -> None:
    async with front() as f:
        has = {"positions": [{"num_tokens": 2, "num_chars": 9}]}
        call = f.inference.Generate(kept(resume=has))
        attach = await f.troupe.get(f.troupe.scheduler, AttachRequest)
        assert attach.gateway == f.troupe.gateway.inbox.address
        request = TokenizeRequest(RequestHeader(attach.request_id, attach.gateway), SamplingParams())
        f.troupe.say(request, "one two")
        f.troupe.say(request, " three", at=(2, 7), token_ids=[7])
        first = await call.read()
        assert (first.text, list(first.token_ids)) == ("hree", [7])
        f.troupe.say(request, " four", at=(3, 13), token_ids=[8], **LAST)
        responses = await rest(call)
        assert "".join(response.text for response in responses) == " four"
        assert await call.code() is grpc.StatusCode.OK


async def test_who_comes_back_too_late_is_told_so() -> None:
    async with front() as f:
        call = f.inference.Generate(kept(resume={}))
        attach = await f.troupe.get(f.troupe.scheduler, AttachRequest)
        f.troupe.tell(
            RequestRejected(attach.request_id, RejectCode.NOT_FOUND, "no such request is kept", "idempotency_key")
        )
        error = await failure(call)
        assert error.code() is grpc.StatusCode.NOT_FOUND and "idempotency_key" in error.details()


async def test_the_old_connection_of_a_client_that_is_back_gets_nothing_more() -> None:
    async with front() as f:
        old = f.inference.Generate(kept())
        request = await f.troupe.request()
        f.troupe.say(request, "one")
        await old.read()
        new = f.inference.Generate(kept(resume={"positions": [{"num_tokens": 1, "num_chars": 3}]}))
        await f.troupe.get(f.troupe.scheduler, AttachRequest)
        with pytest.raises(grpc.aio.AioRpcError):
            await old.read()
        assert await old.code() is grpc.StatusCode.CANCELLED
        f.troupe.say(request, "one two", **LAST)
        assert "".join(response.text for response in await rest(new)) == " two"
        _, word = await f.troupe.asked(AbortRequest)
        assert (word.reason, word.gateway) == ("finished", f.troupe.gateway.inbox.address)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest(text="x", resume={}), "idempotency_key"),
        (GenerateRequest(text="x", idempotency_key="k" * 257), "idempotency_key"),
        (kept(resume={"positions": [{"num_chars": -1}]}), "resume"),
        (kept(resume={"positions": [{}, {}]}), "resume"),
    ],
)
async def test_a_return_that_makes_no_sense_is_refused(request_: Any, field: str) -> None:
    async with front() as f:
        error = await failure(f.inference.Generate(request_))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(error.trailing_metadata())["error-field"] == field
