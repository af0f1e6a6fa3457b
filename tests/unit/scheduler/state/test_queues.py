"""The order of one worker's queue: tenants in turn, what ran before first, the background last."""

from __future__ import annotations

from itertools import count

from services.scheduler.state.fairness import Shares
from services.scheduler.state.queues import WaitingQueue
from services.scheduler.state.sequence import Request, Sequence
from shared.messages import RequestHeader
from shared.requests.sampling import SamplingParams

arrivals = count()


def waiting(
    name: str, tenant: str = "", num_tokens: int = 5, num_cached: int = -1, *, background: bool = False
) -> Sequence:
    header = RequestHeader(name, "g", tenant=tenant, is_background=background)
    arrival = next(arrivals)
    request = Request(header, SamplingParams(max_tokens=4), [1] * num_tokens, [0], arrival)
    return Sequence(request, 0, (0.0, arrival, 0), [1] * num_tokens, num_cached_tokens=num_cached)


def names(queue: WaitingQueue) -> list[str]:
    return [sequence.request.request_id for sequence in queue]


def queue_of(*sequences: Sequence, **served: int) -> WaitingQueue:
    shares = Shares({})
    queue = WaitingQueue(shares)
    for sequence in sequences:
        queue.add(sequence)
    for tenant, num_tokens in served.items():
        shares.charge_prompt(tenant, num_tokens)
    return queue


def test_of_tenants_the_one_that_was_served_least_comes_first_and_each_keeps_its_order() -> None:
    queue = queue_of(waiting("a0", "a"), waiting("a1", "a"), waiting("b0", "b"), waiting("b1", "b"), a=9, b=5)
    assert names(queue) == ["b0", "b1", "a0", "a1"]
    assert [one.request.request_id for one in queue.firsts] == ["a0", "b0"] and queue.tenants == {"a", "b"}
    assert [one.request.request_id for one in queue.of("a")] == ["a0", "a1"] and not list(queue.of("c"))
    assert queue.counts() == {"a": 2, "b": 2}


def test_what_is_charged_meanwhile_counts_at_once() -> None:
    queue = queue_of(waiting("a0", "a"), waiting("a1", "a"), waiting("b0", "b"), a=1, b=5)
    found = []
    for sequence in queue:
        found.append(sequence.request.request_id)
        queue._shares.charge_prompt(sequence.tenant, 8)
    assert found == ["a0", "b0", "a1"]


def test_what_ran_before_comes_first_whatever_the_cache_had_of_it() -> None:
    """Its prompt is charged already."""
    for num_cached in (0, 3):
        queue = queue_of(waiting("new", "poor"), waiting("again", "rich", num_cached=num_cached), rich=100)
        assert names(queue) == ["again", "new"]


def test_the_background_comes_behind_all_and_is_counted_apart() -> None:
    rest, other = waiting("rest", "a", 7, num_cached=0, background=True), waiting("other", "b", 5)
    queue = queue_of(rest, other, waiting("third", "a", 3), b=100)
    assert names(queue) == ["third", "other", "rest"]
    assert (len(queue), queue.num_tokens, queue.num_background, queue.num_background_tokens) == (3, 15, 1, 7)
    rest.token_ids.append(1)  # the last token of a step in flight
    queue.remove(rest)
    assert (len(queue), queue.num_tokens, queue.num_background, queue.num_background_tokens) == (2, 8, 0, 0)
    queue.add(rest)
    assert queue.num_background_tokens == 8
    assert {one.request.request_id for one in queue.take_all()} == {"third", "other", "rest"}
    assert (len(queue), queue.num_tokens, queue.num_background, queue.num_background_tokens) == (0, 0, 0, 0)
    assert not queue.tenants and names(queue) == []


def test_one_that_has_been_away_comes_back_with_the_least_of_those_that_waited() -> None:
    queue = queue_of(waiting("a0", "a"), waiting("b0", "b"), a=30, b=20)
    queue.add(waiting("c0", "c"))
    assert queue._shares.served("c") == 20 and names(queue)[-1] == "a0"
    queue.add(waiting("rest", "d", background=True))
    assert queue._shares.served(queue.firsts[-1].tenant) == 0, "the background shares with its like"
