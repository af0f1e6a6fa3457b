"""What a gateway takes on: requests and tokens, of all and of each tenant; too little time; readers who do not read."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from protos.pageant.v1.inference_pb2 import GenerateRequest, GenerateResponse
from services.gateway.access.forecast import MAX_TENANTS, MIN_SAMPLES, Forecast, Forecasts
from services.gateway.access.limits import Admission, TenantBounds, tokens_of
from shared.clocks.clock import steady_time
from shared.errors import RejectCode, RequestError
from shared.messages import AbortRequest, ChatMessage, RequestHeader, TokenizeRequest
from shared.packing import pack_tokens
from shared.requests.sampling import SamplingParams
from tests.unit.gateway.troupe import LAST, failure, front, until

LOST_SECONDS = 15.0  # after which what a client has not been told does not come any more


def request(
    name: str,
    tenant: str = "",
    *,
    tokens: int = 10,
    max_tokens: int | None = 90,
    n: int = 1,
    is_background: bool = False,
) -> TokenizeRequest:
    header = RequestHeader(name, "g", tenant=tenant, is_background=is_background)
    return TokenizeRequest(header, SamplingParams(max_tokens=max_tokens, n=n), token_ids=pack_tokens([1] * tokens))


def refusal(admission: Admission, one: TokenizeRequest) -> RequestError:
    with pytest.raises(RequestError) as refused:
        admission.admit(one, 512)
    assert refused.value.code is RejectCode.RESOURCE_EXHAUSTED
    assert refused.value.retry_after_ms > 0
    return refused.value


def test_requests_are_bounded_and_each_that_ends_makes_room() -> None:
    admission = Admission(TenantBounds(requests=2), TenantBounds())
    first, second, third = (request(name) for name in "abc")
    admission.admit(first, 512)
    admission.admit(second, 512)
    assert "2 requests are open, the limit is max_open_reqs=2" in str(refusal(admission, third))
    admission.release(first)
    admission.release(first)  # a second time changes nothing
    admission.admit(third, 512)
    refusal(admission, first)


def test_the_background_takes_no_place_of_others_and_has_bounds_of_its_own() -> None:
    admission = Admission(TenantBounds(1), TenantBounds(1), background=TenantBounds(2, 250))
    quiet = [request(name, "t", is_background=True) for name in ("x", "y", "z")]
    admission.admit(quiet[0], 512)
    admission.admit(request("a", "t"), 512)
    assert "max_open_reqs=1" in str(refusal(admission, request("b", "t")))
    admission.admit(quiet[1], 512)
    assert "2 background requests of 200 tokens are open" in str(refusal(admission, quiet[2]))
    assert len(admission) == 1 and admission.num_tokens == 100, "what is counted is the others"
    admission.release(quiet[0])
    admission.release(quiet[0])
    admission.admit(quiet[2], 512)
    admission.release(request("a", "t"))
    admission.admit(request("b", "t"), 512)


def test_tokens_are_bounded_but_the_first_request_always_gets_in() -> None:
    admission = Admission(TenantBounds(tokens=250), TenantBounds())
    admission.admit(request("a"), 512)
    admission.admit(request("b"), 512)
    assert "200 tokens are open and 100 more" in str(refusal(admission, request("c")))
    admission.release(request("a"))
    admission.release(request("b"))
    admission.admit(request("huge", tokens=400), 512)


def test_a_tenant_at_its_bound_leaves_the_others_theirs() -> None:
    admission = Admission(TenantBounds(requests=100), TenantBounds(requests=2, tokens=1000))
    for name in "ab":
        admission.admit(request(name, "greedy"), 512)
    assert "of this tenant 2 requests" in str(refusal(admission, request("c", "greedy")))
    admission.admit(request("d", "modest"), 512)
    admission.release(request("a", "greedy"))
    admission.admit(request("c", "greedy"), 512)


def test_what_is_open_is_the_sum_of_what_was_let_in() -> None:
    """Random admissions and ends: nothing leaks, whatever the order."""
    rng = random.Random(5)
    admission = Admission(TenantBounds(requests=20, tokens=3000), TenantBounds(requests=8, tokens=1500))
    live: dict[str, TokenizeRequest] = {}
    num_refused = 0
    for step in range(5000):
        if rng.random() < 0.55:
            one = request(str(step), rng.choice("xyz"), tokens=rng.randrange(1, 200), max_tokens=rng.randrange(1, 300))
            try:
                admission.admit(one, 512)
                live[one.header.request_id] = one
            except RequestError:
                num_refused += 1
        elif live:
            admission.release(live.pop(rng.choice(list(live))))
        assert admission.num_tokens == sum(tokens_of(one, 512, 64) for one in live.values())
        assert len(admission) == len(live) <= 20
    for one in live.values():
        admission.release(one)
    assert admission.num_tokens == 0 and num_refused > 100


def test_what_a_request_may_come_to_hold() -> None:
    assert tokens_of(request("a", tokens=10, max_tokens=90, n=3), 512, 64) == 10 + 3 * 90
    assert tokens_of(request("a", tokens=500, max_tokens=10**9), 512, 64) == 512
    assert tokens_of(request("a", tokens=10, max_tokens=-5, n=-1), 512, 64) == 10
    assert tokens_of(request("a", tokens=10, max_tokens=10**18, n=2**31), 512, 64) == 10 + 64 * 502
    assert tokens_of(request("a", tokens=10, max_tokens=None), 512, 64) == 10 + 16
    chat = TokenizeRequest(RequestHeader("c", "g"), SamplingParams(), chat=[ChatMessage("user", "x" * 400)])
    assert tokens_of(chat, 512, 64) == 512


def test_retry_after_follows_how_fast_requests_end() -> None:
    now = 100.0
    admission = Admission(TenantBounds(requests=1), TenantBounds(), clock=lambda: now)
    for index in range(50):
        admission.admit(request(str(index)), 512)
        now += 3.0
        admission.release(request(str(index)))
    admission.admit(request("last"), 512)
    assert 2000 < refusal(admission, request("more")).retry_after_ms < 3100


def test_a_forecast_follows_the_queue_that_it_has_seen() -> None:
    forecast = Forecast()
    for index in range(40):
        forecast.opened(str(index), 0.0)
    assert forecast.wait == forecast.needed(100) == 0.0, "nothing is known yet"
    for index in range(40):
        forecast.heard(str(index), (index + 1) * 0.1)
        forecast.heard(str(index), 1e9)  # only the first output counts
    assert 0.09 < forecast.wait < 0.11, "one place"
    for index in range(40, 70):
        forecast.opened(str(index), 10.0)
    assert 2.8 < forecast.wait < 3.3 and len(forecast) == 30
    for index in range(70):
        forecast.closed(str(index), 20.0, 0)
    assert len(forecast) == 0 and forecast.is_empty and forecast.wait < 0.11


def test_a_forecast_reaches_no_further_than_twice_what_it_has_seen() -> None:
    forecast = Forecast()
    for index in range(MIN_SAMPLES):
        forecast.opened(str(index), index)
        forecast.heard(str(index), index + 0.05)
    for index in range(1000):
        forecast.opened(f"burst-{index}", 100.0)
    assert forecast.wait <= 0.1 + 1e-9


def test_outputs_count_where_many_wait_and_only_as_long_as_they_can_be() -> None:
    forecast = Forecast()
    for index in range(40):
        forecast.opened(str(index), 0.0)
    for index in range(40):
        forecast.heard(str(index), 1.0)
        forecast.closed(str(index), 1.0 + 10.0 * (1 + index % 4), 101)
    alone = forecast.needed(None)
    assert alone == forecast.wait < 0.1, "no request waits: it may be quick"
    forecast.opened("one", 100.0)
    assert 40.0 <= forecast.needed(None) < 41.0, "three of four took no longer"
    assert 3.6 <= forecast.needed(10) < 4.0, "ten tokens at 0.4 s"


def test_each_tenant_has_a_queue_of_its_own_and_few_are_remembered() -> None:
    forecasts = Forecasts()
    for index in range(100):
        forecasts.of("crowd").opened(str(index), 0.0)
    for index in range(100):
        forecasts.of("crowd").heard(str(index), 5.0)
    forecasts.of("crowd").opened("waits", 6.0)
    assert forecasts.of("crowd").wait > 0 and forecasts.of("other").wait == 0.0
    for index in range(3 * MAX_TENANTS):
        forecasts.of(f"tenant-{index}")
    assert len(forecasts._tenants) <= MAX_TENANTS
    assert len(forecasts) == 1 == len(forecasts.of("crowd")), "who has a request is not forgotten"


async def test_beyond_the_limit_a_client_learns_without_a_word_to_the_troupe() -> None:
    async with front(max_open_reqs=4) as f:
        calls = [f.inference.Generate(GenerateRequest(text="x")) for _ in range(4)]
        for _ in calls:
            await f.troupe.request()
        await failure(f.inference.Generate(GenerateRequest(text="warm")))
        for _ in range(50):
            error = await failure(f.inference.Generate(GenerateRequest(text="more")))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(error.trailing_metadata())["retry-after-ms"]) > 0
        assert not f.troupe.seen.get("tokenizers"), "nothing of it reached the troupe"
        for call in calls:
            call.cancel()
        await until(lambda: not len(f.troupe.gateway.generation.admission))
        f.troupe.gateway.generation.journal.max_streams = 10
        call = f.inference.Generate(GenerateRequest(text="again"))
        await f.troupe.request()
        call.cancel()


async def test_tenants_have_limits_of_their_own() -> None:
    async with front(max_tenant_reqs=1, api_keys="a:key-of-a-1,b:key-of-b-1") as f:
        held = f.inference.Generate(GenerateRequest(text="x"), metadata=(("x-api-key", "key-of-a-1"),))
        await f.troupe.request()
        error = await failure(f.inference.Generate(GenerateRequest(text="x"), metadata=(("x-api-key", "key-of-a-1"),)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "of this tenant" in error.details()
        other = f.inference.Generate(GenerateRequest(text="y"), metadata=(("x-api-key", "key-of-b-1"),))
        assert (await f.troupe.request()).header.tenant == "b"
        held.cancel()
        other.cancel()


async def test_a_deadline_before_the_first_token_is_due_is_refused_at_once() -> None:
    async with front() as f:
        gateway = f.troupe.gateway
        forecast = gateway.generation.forecasts.of("")
        for index in range(MIN_SAMPLES):
            forecast.opened(str(index), 0.0)
            forecast.heard(str(index), 20.0)
        assert forecast.wait > 2
        error = await failure(f.inference.Generate(GenerateRequest(text="x"), timeout=2.0))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "deadline is in" in error.details()
        assert int(dict(error.trailing_metadata())["retry-after-ms"]) > 0
        call = f.inference.Generate(GenerateRequest(text="patient"), timeout=60.0)
        assert (await f.troupe.request()).text == "patient"
        call.cancel()


async def test_an_expired_deadline_is_never_sent_on() -> None:
    async with front() as f:
        header = RequestHeader("late", "g", deadline=steady_time() - 0.001)
        late = TokenizeRequest(header, SamplingParams(), text="late")
        with pytest.raises(RequestError) as refused:
            f.troupe.gateway.generation.open(late)
        assert refused.value.code is RejectCode.DEADLINE_EXCEEDED
        assert not len(f.troupe.gateway.generation.admission) and not len(f.troupe.gateway.generation.journal)
        call = f.inference.Generate(GenerateRequest(text="next"))
        assert (await f.troupe.request()).text == "next", "the first was never asked"
        call.cancel()


async def test_a_client_that_does_not_read_costs_a_bounded_amount_and_nobody_else() -> None:
    limit = 1 << 20
    async with front(max_unread_bytes=limit) as f:
        gateway = f.troupe.gateway
        stuck = f.inference.Generate(GenerateRequest(text="stuck"))
        request = await f.troupe.request()
        piece, most, sent = "x" * 65536, 0, 0
        for count in range(400):  # 26 MB: far more than gRPC's own windows take
            f.troupe.say(request, piece, at=(count, count * len(piece)))
            sent += len(piece)
            await asyncio.sleep(0)
            stream = gateway.generation.journal.get(request.header.request_id)
            if stream is None:
                break
            most = max(most, stream.num_unread)
        assert most <= limit + 2 * len(piece)
        assert (await f.troupe.get(f.troupe.scheduler, AbortRequest)).request_id == request.header.request_id
        await until(lambda: not len(gateway.generation.journal))
        quick = f.inference.Generate(GenerateRequest(text="quick"))
        f.troupe.say(await f.troupe.request(), "done", **LAST)
        async with asyncio.timeout(30):
            assert (await quick.read()).text == "done"
        got = 0
        try:
            async with asyncio.timeout(LOST_SECONDS):
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    while isinstance(response := await stuck.read(), GenerateResponse):
                        got += len(response.text)
                    await failure(stuck)
        except TimeoutError:
            # On a busy machine gRPC's core loses what opens a full window again, in one of ten such calls: both ends
            # of its connection are empty, and it waits for ever.  The gateway's part, above, is over by then.
            stuck.cancel()
        else:
            assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "does not read" in (ended.value.details() or "")
        assert got < sent


@pytest.mark.parametrize("field", ["max_open_reqs", "max_tenant_tokens"])
def test_limits_are_not_negative(field: str) -> None:
    from shared.config import load_settings
    from shared.errors import ConfigError

    values: dict[str, Any] = {field: -1}
    with pytest.raises(ConfigError, match=field):
        load_settings(values, environ={})


@pytest.mark.parametrize("is_complete", [True, False])
async def test_a_text_that_no_message_can_hold_ends_its_request_alone(*, is_complete: bool) -> None:
    """Half a surrogate pair; where a service is absent it waits, and is sent in a handler once that is there."""
    async with front() as f:
        generation = f.troupe.gateway.generation
        request = TokenizeRequest(RequestHeader("half", "g"), SamplingParams(), text="\ud800")
        if is_complete:
            with pytest.raises(RequestError) as refused:
                generation.open(request)
            assert refused.value.code is RejectCode.INVALID_ARGUMENT
        else:
            f.troupe.announce("worker-a")
            await until(lambda: bool(generation.recovery._deployment.absent))
            stream = generation.open(request)
            f.troupe.announce()
            await until(lambda: stream.error is not None)
            assert stream.error is not None and stream.error.code is RejectCode.INVALID_ARGUMENT
            generation.close(stream)
        assert not len(generation.admission) and not len(generation.journal)
        call = f.inference.Generate(GenerateRequest(text="next"))
        assert (await f.troupe.request()).text == "next"
        call.cancel()
