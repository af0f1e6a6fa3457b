"""Generate over a real gRPC server: what the client sees of what the troupe says."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from protos.pageant.v1.inference_pb2 import GenerateRequest, GenerateResponse
from shared.errors import RejectCode
from shared.messages import AbortRequest, RequestRejected, StreamLost, TokenizeRequest, TokenLogprobs
from shared.requests.grammar import MAX_GRAMMAR_BYTES
from tests.unit.gateway.troupe import LAST, Front, failure, front, until, without_latency


def ask(text: str = "Once", **sampling: Any) -> Any:
    return GenerateRequest(text=text, sampling=sampling)


async def drain(call: Any) -> list[GenerateResponse]:
    responses = []
    while isinstance(response := await call.read(), GenerateResponse):
        responses.append(response)
    return responses


async def test_a_format_that_is_too_long_is_refused_here_and_goes_no_further() -> None:
    async with front() as f:
        error = await failure(f.inference.Generate(ask(grammar={"regex": "a" * (MAX_GRAMMAR_BYTES + 1)})))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"MAX_GRAMMAR_BYTES={MAX_GRAMMAR_BYTES}" in error.details()
        assert not len(f.troupe.gateway.generation.journal)
        call = f.inference.Generate(ask(grammar={"regex": "a" * MAX_GRAMMAR_BYTES}))
        request = await f.troupe.request()
        assert request.params.grammar is not None and len(request.params.grammar.text) == MAX_GRAMMAR_BYTES
        call.cancel()


async def test_a_request_waits_for_its_first_token_until_one_comes() -> None:
    async with front() as f:
        forecasts = f.troupe.gateway.generation.forecasts
        call = f.inference.Generate(ask())
        request = await f.troupe.request()
        assert len(forecasts) == 1
        f.troupe.say(request, "upon")
        assert (await call.read()).text == "upon"
        assert len(forecasts) == 0
        call.cancel()


async def test_a_stream_from_first_token_to_usage() -> None:
    async with front() as f:
        call = f.inference.Generate(ask(max_tokens=4, temperature=0.7), metadata=(("x-tenant", "acme"),))
        request = await f.troupe.request()
        assert request.text == "Once"
        assert (request.params.temperature, request.params.max_tokens, request.params.top_p) == (0.7, 4, None)
        assert request.params.seed is not None
        assert request.header.tenant == "acme" and request.header.cache_salt
        assert request.header.gateway == f.troupe.gateway.inbox.address
        f.troupe.say(request, "upon a", num_prompt_tokens=3, num_cached_tokens=1)
        first = await call.read()
        drafts = {"num_draft_tokens": 6, "num_accepted_tokens": 2}
        f.troupe.say(request, " time", at=(2, 6), num_output_tokens=3, **drafts, **LAST)
        rest = await drain(call)
        assert first.text + "".join(response.text for response in rest) == "upon a time"
        assert first.request_id == request.header.request_id and not first.token_ids
        assert rest[-1].finish_reason == 1 and rest[-1].stop_reason == "2"
        usage = rest[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 3, 1)
        assert (usage.num_draft_tokens, usage.num_accepted_tokens) == (6, 2)
        assert await call.code() is grpc.StatusCode.OK
        assert dict(await call.initial_metadata())["x-request-id"] == request.header.request_id
        assert not len(f.troupe.gateway.generation.journal)


async def test_sequences_of_one_request_share_its_stream() -> None:
    async with front() as f:
        call = f.inference.Generate(ask(n=2))
        request = await f.troupe.request()
        f.troupe.say(request, "one", index=0, **LAST)
        f.troupe.say(request, "other", index=1)
        f.troupe.say(request, " end", at=(1, 5), index=1, **LAST)
        texts = {0: "", 1: ""}
        for response in await drain(call):
            texts[response.index] += response.text
        assert texts == {0: "one", 1: "other end"}


async def test_a_replay_is_recognised_and_dropped() -> None:
    async with front() as f:
        call = f.inference.Generate(GenerateRequest(text="x", stream={"return_token_ids": True}))
        request = await f.troupe.request()
        f.troupe.say(request, "a b")
        f.troupe.say(request, "a b")
        f.troupe.say(request, "a b c", **LAST)
        responses = await drain(call)
        assert "".join(response.text for response in responses) == "a b c"
        assert [token for response in responses for token in response.token_ids] == [0, 1, 2]


async def test_lost_output_is_asked_for_again_once() -> None:
    async with front() as f:
        call = f.inference.Generate(ask())
        request = await f.troupe.request()
        f.troupe.say(request, "later", at=(1, 6))
        f.troupe.say(request, " still", at=(2, 11))
        lost = await f.troupe.get(f.troupe.scheduler, StreamLost)
        assert (lost.request_id, lost.index) == (request.header.request_id, 0)
        f.troupe.say(request, "first later still", **LAST)
        assert "".join(response.text for response in await drain(call)) == "first later still"
        assert not [m for m in f.troupe.seen[f.troupe.scheduler.address] if isinstance(m, StreamLost)]


async def test_logprobs_and_prompt_logprobs() -> None:
    async with front() as f:
        call = f.inference.Generate(ask(logprobs=1, prompt_logprobs=1))
        request = await f.troupe.request()
        entry = TokenLogprobs([5, 6], [-0.5, -0.25], 2)
        f.troupe.say(request, "hm", logprobs=[entry], prompt_logprobs=[None, entry], **LAST)
        (response,) = await drain(call)
        assert response.logprobs[0].token.token_id == 5 and response.logprobs[0].rank == 2
        assert [(c.token_id, c.logprob) for c in response.logprobs[0].top] == [(6, -0.25)]
        assert not response.prompt_logprobs[0].HasField("token")
        assert response.prompt_logprobs[1].token.logprob == -0.5


@pytest.mark.parametrize("code", [code for code in RejectCode if code is not RejectCode.UNAVAILABLE])
async def test_each_refusal_is_a_status(code: RejectCode) -> None:
    async with front() as f:
        call = f.inference.Generate(ask())
        request = await f.troupe.request()
        f.troupe.tell(RequestRejected(request.header.request_id, code, "must be at most 64, got 65", "n", 250))
        error = await failure(call)
        assert error.code().name == code.name
        assert error.details() == "n: must be at most 64, got 65"
        assert dict(error.trailing_metadata()) == {"error-field": "n", "retry-after-ms": "250"}


async def test_the_clients_cancel_becomes_an_abort_at_the_same_tokenizer() -> None:
    async with front() as f:
        call = f.inference.Generate(ask())
        name, request = await f.troupe.asked(TokenizeRequest)
        f.troupe.say(request, "some")
        await call.read()
        call.cancel()
        where, abort = await f.troupe.asked(AbortRequest)
        assert (where, abort.request_id) == (name, request.header.request_id)
        await until(lambda: not len(f.troupe.gateway.generation.journal))


async def test_a_clients_death_becomes_an_abort() -> None:
    async with front() as f:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{f.troupe.gateway.server.port}") as channel:
            call = Front(f.troupe, channel).inference.Generate(ask())
            request = await f.troupe.request()
            assert not call.done()
        assert (await f.troupe.asked(AbortRequest))[1].request_id == request.header.request_id


async def test_the_calls_deadline_travels_and_ends_it() -> None:
    async with front() as f:
        call = f.inference.Generate(ask(), timeout=0.2)
        request = await f.troupe.request()
        deadline = request.header.deadline
        assert deadline is not None and abs(deadline - request.header.arrival_time - 0.2) < 0.1
        assert (await failure(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await f.troupe.asked(AbortRequest))[1].request_id == request.header.request_id


async def test_a_slow_reader_holds_up_nobody_and_gets_everything() -> None:
    async with front() as f:
        slow = f.inference.Generate(ask("slow"))
        request = await f.troupe.request()
        piece = "x" * 4096
        for count in range(2000):
            f.troupe.say(request, piece, at=(count, count * 4096))
        f.troupe.say(request, "end", at=(2000, 2000 * 4096), **LAST)
        quick = f.inference.Generate(ask("quick"))
        other = await f.troupe.request()
        f.troupe.say(other, "done", **LAST)
        async with asyncio.timeout(30):
            assert [response.text for response in await drain(quick)] == ["done"]
        responses = await drain(slow)
        assert sum(len(response.text) for response in responses) == 2000 * 4096 + 3
        assert len(responses) < 1000  # coalesced


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (GenerateRequest(text="x", model="other"), grpc.StatusCode.NOT_FOUND, "model"),
        (GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "input"),
        (GenerateRequest(text="x", label="l" * 257), grpc.StatusCode.INVALID_ARGUMENT, "label"),
        (GenerateRequest(chat={}), grpc.StatusCode.INVALID_ARGUMENT, "chat"),
        (GenerateRequest(token_ids={"ids": [1] * 501}), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ],
)
async def test_what_the_gateway_refuses_itself(request_: Any, code: grpc.StatusCode, field: str) -> None:
    async with front() as f:
        error = await failure(f.inference.Generate(request_))
        assert error.code() is code
        assert dict(error.trailing_metadata())["error-field"] == field
    assert "tiny" in error.details() or code is not grpc.StatusCode.NOT_FOUND


async def test_an_oversize_message_costs_only_itself() -> None:
    async with front(max_request_bytes=1 << 16) as f:
        error = await failure(f.inference.Generate(ask("x" * (1 << 17))))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call = f.inference.Generate(ask("fits"))
        f.troupe.say(await f.troupe.request(), "yes", **LAST)
        assert [response.text for response in await drain(call)] == ["yes"]


async def test_full_is_resource_exhausted_with_a_time_to_come_back() -> None:
    async with front(max_num_queued_reqs=1, max_num_seqs=1) as f:
        calls = [f.inference.Generate(ask(str(count))) for count in range(4)]
        for _ in calls:
            await f.troupe.request()
        error = await failure(f.inference.Generate(ask("one more")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata())["retry-after-ms"] == "1000"
        for call in calls:
            call.cancel()


async def test_an_unanswered_request_moves_when_its_tokenizer_dies() -> None:
    async with front() as f:
        call = f.inference.Generate(ask())
        name, request = await f.troupe.asked(TokenizeRequest)
        f.troupe.announce(name)
        other, again = await f.troupe.asked(TokenizeRequest)
        assert other != name and without_latency(again) == without_latency(request)
        f.troupe.say(request, "there", **LAST)
        assert [response.text for response in await drain(call)] == ["there"]


async def test_the_abort_of_a_stream_whose_request_came_late_follows_it() -> None:
    async with front() as f:
        call = f.inference.Generate(ask())
        request = await f.troupe.request()
        f.troupe.say(request, "all", **LAST)
        await drain(call)
        await f.troupe.asked(AbortRequest)
        f.troupe.say(request, "again")
        assert (await f.troupe.get(f.troupe.scheduler, AbortRequest)).request_id == request.header.request_id
