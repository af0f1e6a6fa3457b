"""The open-loop generator against servers that are not there: when requests leave, what counts from when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest

from services.cli.bench.generator import Generator, RequestOutcome, lateness
from shared.metrics import Timeline, peak_concurrency
from shared.workload import LoadRequest, TokenPrompt

PROMPT = TokenPrompt(b"")
SLACK = 2.0  # seconds by which a busy machine may be late


def request(time: float) -> LoadRequest:
    return LoadRequest(PROMPT, 0, 4, time)


class Server:
    """Answers with two tokens, the first after `first` seconds; `stuck_until` holds everything up to that time."""

    def __init__(self, first: float = 0.0, stuck_until: float = 0.0, fails: frozenset[float] = frozenset()) -> None:
        self.first, self.stuck_until, self.fails = first, stuck_until, fails
        self.num_open = self.most_open = 0

    async def stream(self, request: LoadRequest, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(max(self.first, self.stuck_until - clock()))
        self.num_open -= 1
        if request.time in self.fails:
            outcome.error = "UNAVAILABLE: no"
            return
        outcome.timeline.add(clock())
        outcome.timeline.add(clock())


async def test_requests_leave_when_they_are_due_and_none_before() -> None:
    times = [0.0, 0.05, 0.05, 0.2]
    ended: list[RequestOutcome] = []
    outcomes = await Generator(Server()).send([request(time) for time in times], ended.append)
    assert [outcome.timeline.start for outcome in outcomes] == times
    for outcome, time in zip(outcomes, times, strict=True):
        assert time <= outcome.sent < time + SLACK
        assert outcome.succeeded and outcome.num_output_tokens == 2
    assert len(ended) == 4 and all(before.sent <= after.sent for before, after in pairwise(outcomes))


async def test_a_server_that_stands_still_does_not_hold_requests_back() -> None:
    """Coordinated omission: a closed loop would send one request in that time, and report one long latency."""
    server = Server(stuck_until=SLACK)
    outcomes = await Generator(server).send([request(0.05 * index) for index in range(8)], lambda _: None)
    assert server.most_open == 8, "all have left while the first was held"
    for index, outcome in enumerate(outcomes):
        waited = SLACK - 0.05 * index
        assert outcome.timeline.ttft is not None and outcome.timeline.ttft >= waited - 0.01


async def test_waiting_for_a_place_counts_where_requests_have_times_of_their_own() -> None:
    server = Server(first=0.1)
    outcomes = await Generator(server, max_concurrency=1).send(
        [request(time) for time in (0.0, 0.001, 0.002)], lambda _: None
    )
    assert server.most_open == 1
    ttfts = [outcome.timeline.ttft or 0 for outcome in outcomes]
    assert ttfts[2] > 0.28, "two requests were before it"
    assert outcomes[2].sent > 0.19 and outcomes[2].late < SLACK


async def test_where_all_are_due_at_once_latency_counts_from_the_place() -> None:
    server = Server(first=0.1)
    outcomes = await Generator(server, max_concurrency=2).send([request(0.0)] * 6, lambda _: None)
    assert server.most_open == 2
    assert all(outcome.timeline.start == outcome.sent for outcome in outcomes)
    assert all((outcome.timeline.ttft or 0) > 0.09 for outcome in outcomes)
    assert peak_concurrency((outcome.sent, outcome.end) for outcome in outcomes) == 2


async def test_failures_are_outcomes() -> None:
    outcomes = await Generator(Server(fails=frozenset({0.01}))).send([request(0.0), request(0.01)], lambda _: None)
    assert [outcome.succeeded for outcome in outcomes] == [True, False]
    assert outcomes[1].error == "UNAVAILABLE: no"


async def test_a_generator_that_is_held_up_says_so() -> None:
    """Something in its loop takes 200 ms: what was due in that time leaves late, and the latency shows it."""

    class Hog(Server):
        async def stream(self, request: LoadRequest, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
            if request.time == 0.0:
                until = clock() + 0.2
                while clock() < until:
                    pass
            await super().stream(request, outcome, clock)

    outcomes = await Generator(Hog()).send([request(time) for time in (0.0, 0.05)], lambda _: None)
    num_late, worst = lateness(outcomes)
    assert num_late >= 1 and worst > 0.1
    assert (outcomes[1].timeline.ttft or 0) > 0.1


async def test_an_error_of_the_generator_s_own_ends_it() -> None:
    class Broken(Server):
        async def stream(self, request: LoadRequest, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await Generator(Broken()).send([request(0.0)], lambda _: None)


async def test_nothing_to_send_is_sent() -> None:
    assert await Generator(Server()).send([], lambda _: None) == []


def test_lateness() -> None:
    late = [RequestOutcome(Timeline(0.0), late=value) for value in (0.0, 0.02, 0.5)]
    assert lateness(late) == (2, 0.5)
