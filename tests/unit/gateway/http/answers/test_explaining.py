"""Where the time went, for clients of the HTTP front that ask: whole answers and streams, of every endpoint."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2
import pytest
import structlog

from shared.messages import LatencyBreakdown, TokenizeRequest, TokenLogprobs
from shared.tracing.latency import LatencyTracker
from shared.tracing.phases import Miss, Phase
from tests.unit.gateway.http.client import Http, http, streaming
from tests.unit.gateway.troupe import LAST

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi"},
}
MISSES = [7 if miss is Miss.SALT else 5 if miss is Miss.EVICTED else 0 for miss in Miss]
QUEUED, PREFILLED = 0.004, 0.003  # seconds


def latency_of(request: TokenizeRequest) -> LatencyBreakdown:
    """The troupe's tracker of a request: what is left of its time until now has gone into its decoding."""
    assert request.latency is not None
    tracker = LatencyTracker(Phase.QUEUE_BLOCKS, request.latency.stamp, request.latency)
    tracker.enter(Phase.PREFILL, tracker.since + QUEUED)
    tracker.enter(Phase.DECODE, tracker.since + PREFILLED)
    tracker.misses, tracker.evicted_ago, tracker.num_ahead, tracker.num_chunks = list(MISSES), 5120, 14, 2
    return tracker.breakdown(time.time())


async def answer(h: Http, request: TokenizeRequest, *, seconds: float = 0.03) -> None:
    """One request's output, which takes a while."""
    await asyncio.sleep(seconds)
    h.troupe.say(request, "Yes ", latency=latency_of(request))
    await asyncio.sleep(0.01)
    h.troupe.say(request, "no", at=(1, 4), latency=latency_of(request), num_output_tokens=2, **LAST)


def objects(response: httpx2.Response) -> list[Any]:
    """The answer, or the data of its events."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def explanations(response: httpx2.Response) -> list[Any]:
    """What the last object says; no other may say anything."""
    *early, last = objects(response)
    told = [one.get("response", one).get("explanations") for one in (*early, last)]
    assert not any(told[:-1])
    found: list[Any] = told[-1] or []
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_phases_add_up_to_what_the_client_waited_for(path: str, stream: bool) -> None:
    async with http() as h:
        with structlog.testing.capture_logs() as lines:
            began = time.perf_counter()
            asked = h.post(path, ENDPOINTS[path] | {"explain": True, "stream": stream})
            await answer(h, await h.troupe.request(), seconds=0.3)
            response = await asked
            waited = (time.perf_counter() - began) * 1000
        (told,) = explanations(response)
        (line,) = [line for line in lines if line["event"] == "request_finished"]
        whole = sum(told["phases"].values())
        assert whole == pytest.approx(line["e2e_ms"], rel=0.01, abs=50), (
            "the line is written a moment later, on a busy machine a long one"
        )
        assert 310 <= whole <= waited, "from the request's arrival to its last output, and no more"
        assert (told["phases"]["queue_blocks"], told["phases"]["prefill"]) == pytest.approx((4, 3), abs=0.01)
        assert (told["num_ahead"], told["num_chunks"], told["num_preemptions"]) == (14, 2, 0)
        assert told["evicted_ago_ms"] == 5120
        assert told["misses"] == {"evicted": 5, "never_seen": 7}, "what another tenant's cache holds is not said"
        assert told["cause"].endswith(" generating")


@pytest.mark.parametrize("given", [{}, {"explain": False}, {"explain": None}])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_who_did_not_ask_is_not_told(path: str, given: dict[str, Any]) -> None:
    async with http() as h:
        for stream in (False, True):
            asked = h.post(path, ENDPOINTS[path] | given | {"stream": stream})
            await answer(h, await h.troupe.request(), seconds=0)
            assert "explanations" not in (await asked).text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_each_prompt_has_its_own_which_ends_with_its_own_output(stream: bool) -> None:
    async with http() as h:
        asked = h.post("/v1/completions", {"prompt": ["slow", "quick"], "explain": True, "stream": stream})
        requests = {request.text: request for request in [await h.troupe.request(), await h.troupe.request()]}
        await answer(h, requests["quick"], seconds=0)
        await answer(h, requests["slow"], seconds=0.3)
        slow, quick = (sum(one["phases"].values()) for one in explanations(await asked))
        assert slow > 300 and slow - quick > 250, "the wait for the other prompt is none of this one's time"


async def test_a_stream_s_last_event_has_it_beside_the_usage() -> None:
    async with http() as h:
        for path, options in (("/v1/completions", True), ("/v1/chat/completions", True), ("/v1/completions", False)):
            asked = h.post(
                path, streaming(ENDPOINTS[path]) | {"explain": True, "stream_options": {"include_usage": options}}
            )
            await answer(h, await h.troupe.request(), seconds=0)
            last = objects(await asked)[-1]
            assert last["choices"] == [] and last["explanations"] and ("usage" in last) is options


async def test_a_beam_search_is_explained_too() -> None:
    async with http() as h:
        body = ENDPOINTS["/v1/completions"] | {"use_beam_search": True, "beam_width": 2, "n": 2, "explain": True}
        asked = h.post("/v1/completions", body)
        request = await h.troupe.request()
        await asyncio.sleep(0.02)
        for index in range(2):
            h.troupe.say(request, "Yes", index=index, latency=latency_of(request), num_output_tokens=1, **LAST)
        response = await asked
        assert len(response.json()["choices"]) == 2
        (told,) = explanations(response)
        assert told["phases"]["prefill"] == pytest.approx(3, abs=0.01) and sum(MISSES) == sum(told["misses"].values())


async def test_where_no_account_is_kept_there_is_nothing_to_tell() -> None:
    async with http(tracing=False) as h:
        asked = h.post("/v1/completions", ENDPOINTS["/v1/completions"] | {"explain": True})
        h.troupe.say(await h.troupe.request(), "Yes", **LAST)
        assert "explanations" not in (await asked).json()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_a_stream_asks_before_it_writes_is_none_of_its_client_s_time(path: str) -> None:
    async with http() as h:
        scores = {"logprobs": 1} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 1}
        asked = h.post(path, streaming(ENDPOINTS[path]) | scores | {"explain": True})
        request = await h.troupe.request()
        entry = TokenLogprobs([0, 8], [-1.5, -0.5], 2)
        h.troupe.say(request, "Yes", logprobs=[entry], latency=latency_of(request), num_output_tokens=1, **LAST)
        await asyncio.sleep(0.1)
        await h.answer_pieces()
        (told,) = explanations(await asked)
        assert told["phases"]["gateway"] > 90 and told["phases"].get("client_blocked", 0) < 50


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_server_may_tell_every_request_s_times(path: str) -> None:
    """As vLLM does: with a whole answer, or with the last usage of a stream."""
    async with http(enable_per_request_metrics=True) as h:
        options = {"stream_options": {"include_usage": True}}
        for more in ({}, {"stream": True}, {"stream": True} | options):
            asked = h.post(path, ENDPOINTS[path] | more)
            await answer(h, await h.troupe.request())
            *early, last = objects(await asked)
            assert not any("metrics" in one for one in early)
            assert ("metrics" in last) is ("usage" in last)
            if "metrics" in last:
                told = last["metrics"]
                assert (told["queue_time_ms"], told["time_to_first_token_ms"]) == pytest.approx((4, 3), abs=0.01)
                assert told["mean_itl_ms"] == pytest.approx(told["generation_time_ms"], abs=0.01), "of two tokens"
                assert told["tokens_per_second"] == pytest.approx(2000 / (3 + told["generation_time_ms"]), rel=0.01)


async def test_one_token_has_no_time_between_tokens() -> None:
    async with http(enable_per_request_metrics=True) as h:
        asked = h.post("/v1/completions", {"prompt": "Once"})
        request = await h.troupe.request()
        await asyncio.sleep(0.01)
        h.troupe.say(request, "Yes", latency=latency_of(request), num_output_tokens=1, **LAST)
        assert "mean_itl_ms" not in (await asked).json()["metrics"]
