"""Virtual time by hand, determinism, and that the simulated scheduler is the real one."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from services.scheduler.invariants import check
from services.scheduler.state.policy import Policy
from services.simulator.simulation import Delays, Simulation
from services.simulator.sweep import (
    Configuration,
    Scenario,
    SimulatedOutcome,
    cheapest,
    configurations,
    outcome_of,
    simulate,
)
from shared.messages import WorkerCapacity
from shared.metrics import Slo
from shared.metrics.steps import StepWork
from shared.workload import LoadRequest, RandomLengths, arrival_times, at_times, random_requests

AT_ONCE = Delays(0, 0, 0, 0, 0, 0)
VOCAB = 1 << 16


class Seconds:
    """A step takes so long for itself, and so long per token."""

    def __init__(self, fixed: float, per_token: float) -> None:
        self.fixed, self.per_token = fixed, per_token

    def seconds(self, work: StepWork, start: float, worker: int) -> float:
        return self.fixed + self.per_token * work.num_tokens


def requests(count: int, rate: float, lengths: RandomLengths, seed: int = 1) -> list[LoadRequest]:
    rng = Random(seed)
    return at_times(random_requests(count, lengths, VOCAB, rng), arrival_times(count, rate, 1.0, rng))


def simulation(num_workers: int = 1, delays: Delays = AT_ONCE, num_blocks: int = 512, **policy: Any) -> Simulation:
    capacity = WorkerCapacity(num_blocks, 16, 64, 4096, VOCAB, "m", "float32", "cpu")
    return Simulation(Policy(**policy), capacity, num_workers, Seconds(0.1, 0.001), delays)


def test_one_request_takes_the_time_of_its_steps() -> None:
    run = simulation()
    (request,) = random_requests(1, RandomLengths(100, 3), VOCAB, Random(1))
    run.run(iter([request]))
    record = run.observer.records["0"]
    assert record.first == pytest.approx(0.1 + 0.1), "100 tokens in one step"
    assert record.last == pytest.approx(0.2 + 2 * 0.101)
    assert record.tpot == pytest.approx(0.101) and record.num_tokens == 3
    assert run.observer.gaps.summary().mean == pytest.approx(0.101)
    check(run.core)
    assert not run.core.finished, "what clients have is forgotten"


def test_ways_scatter_as_given_and_always_alike() -> None:
    """Requests that meet no other: each TTFT is its step and the median way, and one of the differences."""
    differences = (-0.5, 0.25, 2.0)
    made = random_requests(40, RandomLengths(100, 1), VOCAB, Random(1))
    alone = at_times(made, [10.0 * index for index in range(40)])

    def ttfts() -> list[float]:
        run = simulation(delays=Delays(1.0, 0, 0, 0, 0, 0, scatter=differences))
        run.run(iter(alone))
        return [run.observer.records[str(index)].ttft or 0.0 for index in range(40)]

    found = ttfts()
    assert found == ttfts()
    assert {round(ttft - 0.2 - 1.0, 6) for ttft in found} == set(differences)


def test_delays_are_where_they_belong() -> None:
    delays = Delays(inbound=1.0, inbound_per_token=0.01, outbound=0.5, link=0.2, per_step=0.05, per_sequence=0.025)
    run = simulation(delays=delays)
    (request,) = random_requests(1, RandomLengths(100, 1), VOCAB, Random(1))
    run.run(iter([request]))
    expected = 1.0 + 100 * 0.01 + 0.05 + 0.025 + 0.2 + 0.2 + 0.2 + 0.5
    assert run.observer.records["0"].first == pytest.approx(expected)


def test_a_request_takes_time_from_a_worker_that_computes_and_none_from_one_that_waits() -> None:
    def ends(*times: float) -> list[float]:
        run = simulation(delays=Delays(0, 0, 0, 0, 0, 0, per_arrival=0.01))
        run.run(iter(at_times(random_requests(len(times), RandomLengths(10, 1), VOCAB, Random(1)), times)))
        return [record.first or 0.0 for record in run.observer.records.values()]

    assert ends(1.0, 3.0) == pytest.approx([1.11, 3.11]), "each alone"
    assert ends(1.0, 1.05) == pytest.approx([1.11, 1.11 + 0.12]), "the second meets the first one's step"


def test_two_steps_in_flight_hide_the_link() -> None:
    hidden = simulation(delays=Delays(0, 0, 0, link=0.02, per_step=0.0, per_sequence=0.0))
    (request,) = random_requests(1, RandomLengths(10, 50), VOCAB, Random(1))
    hidden.run(iter([request]))
    assert hidden.observer.records["0"].tpot == pytest.approx(0.101, rel=1e-3)


def test_a_request_that_waits_counts_from_when_it_was_sent() -> None:
    run = simulation(max_num_batched_tokens=128)
    three = random_requests(3, RandomLengths(128, 1), VOCAB, Random(1))
    run.run(iter(three))
    firsts = [record.ttft for record in run.observer.records.values()]
    assert firsts == pytest.approx([0.228, 0.456, 0.684])


def test_the_same_load_gives_the_same_run_and_another_seed_another() -> None:
    def once(seed: int) -> SimulatedOutcome:
        run = simulation(3, Delays())
        run.run(iter(requests(150, 20, RandomLengths(200, 20, prefix_len=64, range_ratio=0.5), seed)))
        return outcome_of(run, Slo(ttft=0.5))

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_blocks_that_run_out_cause_preemptions_and_everyone_ends() -> None:
    run = simulation(num_blocks=24)
    run.run(iter(requests(30, 1000, RandomLengths(60, 60), 4)))
    outcome = outcome_of(run, Slo())
    assert outcome.completed == 30 and outcome.num_preemptions > 0
    assert run.core.replicas["w0"].pool.num_available == 24
    check(run.core)


def test_a_shared_prefix_is_hit_where_there_is_a_cache() -> None:
    load = requests(40, 5, RandomLengths(32, 4, prefix_len=320), 2)
    hits = []
    for caches in (True, False):
        run = simulation(enable_prefix_caching=caches)
        run.run(iter(load))
        hits.append(outcome_of(run, Slo()).hit_rate)
    assert hits[0] == pytest.approx(39 * 320 / (40 * 352), rel=0.05) and hits[1] == 0


def test_a_full_queue_rejects_and_the_rejected_miss_the_objective() -> None:
    run = simulation(max_num_queued_reqs=2)
    run.run(iter(random_requests(10, RandomLengths(2000, 2), VOCAB, Random(1))))
    outcome = outcome_of(run, Slo(e2el=1e9))
    assert outcome.rejected > 0 and outcome.completed + outcome.rejected == 10
    assert outcome.attainment == outcome.completed / 10


def scenario(load: list[LoadRequest], slo: Slo) -> Scenario:
    def made(num_workers: int) -> Iterator[LoadRequest]:
        return iter(load)

    return Scenario(made, Seconds(0.01, 0.0005), Policy(), 64, 4096, slo=slo)


def test_more_workers_wait_less_and_the_cheapest_that_does_is_found() -> None:
    load = requests(120, 12, RandomLengths(200, 10), 3)
    every = configurations([1, 2, 4, 8], lambda size: [4096 // size], [16], [512], ["least_loaded"])
    results = [simulate(scenario(load, Slo(ttft=0.4)), configuration) for configuration in every]
    ttfts = [result.outcome.ttft.percentiles[99.0] for result in results]
    assert ttfts == sorted(ttfts, reverse=True) and ttfts[0] > 2 * ttfts[-1]
    found = cheapest(results, 0.99, lambda c: c.num_workers)
    best = min(r.configuration.num_workers for r in results if r.outcome.attainment >= 0.99)
    assert found[0].configuration.num_workers == best > 1
    assert not cheapest(results, 1.1, lambda c: c.num_workers)


def test_round_robin_misses_prefixes_that_prefix_aware_routing_finds() -> None:
    """Eight conversations in turn: eight contexts do not fit one worker's cache, but one or two of them do."""
    rng = Random(5)
    groups = [random_requests(12, RandomLengths(16, 4, prefix_len=1024), VOCAB, rng) for _ in range(8)]
    mixed = [request for turn in zip(*groups, strict=True) for request in rng.sample(turn, len(turn))]
    load = at_times(mixed, arrival_times(len(mixed), 2, 1.0, rng))
    hits = {}
    for policy in ("round_robin", "least_loaded", "prefix_aware"):
        configuration = Configuration(4, 200, 16, 2048, policy)
        hits[policy] = simulate(scenario(load, Slo()), configuration).outcome.hit_rate
    assert hits["prefix_aware"] > 0.8 > hits["round_robin"] + 0.2, hits


def test_combinations() -> None:
    every = configurations([1, 2], lambda size: [1024 // size], [8, 16], [256], ["round_robin", "prefix_aware"])
    assert len(every) == 8
    assert Configuration(2, 64, 16, 256, "prefix_aware") in every
