"""What one tenant costs another, in virtual time: the scheduler's part of it, to the last digit."""

from __future__ import annotations

from heapq import merge
from random import Random

import msgspec
import pytest

from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import MAX_PREEMPTIONS
from services.simulator.observer import RequestRecord
from services.simulator.simulation import Delays, Simulation
from shared.messages import WorkerCapacity
from shared.metrics import summarise
from shared.metrics.steps import StepWork
from shared.workload import LoadRequest, RandomLengths, arrival_times, at_times, random_requests

VOCAB = 1 << 16
SECONDS = 40.0
FEWER_SECONDS = 20.0  # where only sums are looked at
SHORT = RandomLengths(96, 32)
ROWS = 32
MAX_RATIO = 1.5


class Steps:
    """Each takes so long for itself, and so long per token."""

    def __init__(self, fixed: float = 0.025, per_token: float = 0.0) -> None:
        self.fixed, self.per_token = fixed, per_token

    def seconds(self, work: StepWork, start: float, worker: int) -> float:
        return self.fixed + self.per_token * work.num_tokens


def load(tenant: str, rate: float, lengths: RandomLengths, seed: int, seconds: float = SECONDS) -> list[LoadRequest]:
    rng, count = Random(seed), int(rate * seconds)
    requests = at_times(random_requests(count, lengths, VOCAB, rng), arrival_times(count, rate, 1.0, rng))
    return [msgspec.structs.replace(request, tenant=tenant) for request in requests]


def run(*loads: list[LoadRequest], steps: Steps, num_blocks: int = 1 << 16, **policy: int | str) -> Simulation:
    capacity = WorkerCapacity(num_blocks, 16, ROWS, 8192, VOCAB, "m", "float32", "cpu")
    chosen = Policy(max_num_queued_reqs=1 << 20, max_num_queued_tokens=1 << 40, **policy)  # type: ignore[arg-type]
    simulation = Simulation(chosen, capacity, 1, steps, Delays())
    simulation.run(merge(*loads, key=lambda request: request.time))
    return simulation


def capacity_of(lengths: RandomLengths, steps: Steps, num_blocks: int) -> float:
    """Requests per second, where there are always more."""
    count = 200
    at_once = random_requests(count, lengths, VOCAB, Random(9))
    return count / run(at_once, steps=steps, num_blocks=num_blocks).end


def records(simulation: Simulation, tenant: str) -> list[RequestRecord]:
    return [record for record in simulation.observer.records.values() if record.tenant == tenant]


def p99(simulation: Simulation, tenant: str) -> float:
    firsts = [record.ttft for record in records(simulation, tenant)]
    return summarise([ttft for ttft in firsts if ttft is not None], (99.0,)).percentiles[99.0]


def beside(
    lengths: RandomLengths, *, steps: Steps | None = None, times: float = 10, num_blocks: int = 1 << 16
) -> tuple[float, Simulation]:
    """A tenant that asks for a tenth of what there is, beside one that asks `times` as much: by how much its p99 of
    first tokens is longer than alone, and the run."""
    steps = steps or Steps()
    modest = load("modest", capacity_of(SHORT, steps, num_blocks) / 10, SHORT, 3)
    greedy = load("greedy", times * capacity_of(lengths, steps, num_blocks) / 10, lengths, 4)
    alone = run(modest, steps=steps, num_blocks=num_blocks)
    together = run(modest, greedy, steps=steps, num_blocks=num_blocks)
    return p99(together, "modest") / p99(alone, "modest"), together


LOADS = {
    "alike": {"lengths": SHORT},
    "of mixed lengths": {"lengths": RandomLengths(96, 32, range_ratio=0.9)},
    "long outputs": {"lengths": RandomLengths(96, 512, range_ratio=0.5)},
    "twenty times": {"lengths": SHORT, "times": 20},
    "few blocks": {"lengths": RandomLengths(200, 64, range_ratio=0.5), "num_blocks": 300},
}


@pytest.mark.parametrize("name", LOADS)
def test_ten_times_the_load_of_another_moves_a_tenants_first_tokens_by_little(name: str) -> None:
    ratio, together = beside(**LOADS[name])  # type: ignore[arg-type]
    assert ratio <= MAX_RATIO
    assert all(record.is_finished for record in together.observer.records.values())
    assert 0 < together.core.counters.num_preemptions <= MAX_PREEMPTIONS * len(records(together, "greedy"))


def test_it_moves_them_by_much_where_rows_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "is_shared", False)
    assert beside(**LOADS["long outputs"])[0] > 2 * MAX_RATIO  # type: ignore[arg-type]


def test_giving_way_costs_no_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = beside(SHORT)[1].end
    monkeypatch.setattr(Replica, "is_shared", False)
    assert shared <= 1.03 * beside(SHORT)[1].end


def served(simulation: Simulation, tenant: str) -> int:
    """Tokens of the requests that ended while all tenants still sent, as they are charged."""
    done = [record for record in records(simulation, tenant) if 4 < record.last <= FEWER_SECONDS]
    return sum(record.num_prompt_tokens + 2 * record.num_tokens for record in done)


@pytest.mark.parametrize(
    ("one", "other", "weights", "ratio"),
    [
        (SHORT, SHORT, "", 1.0),
        (SHORT, SHORT, "one=3", 3.0),
        (RandomLengths(2000, 32, range_ratio=0.5), RandomLengths(96, 256, range_ratio=0.5), "", 1.0),
    ],
    ids=["alike", "weights", "prompts and outputs"],
)
def test_who_wants_more_than_there_is_shares_by_weight(
    one: RandomLengths, other: RandomLengths, weights: str, ratio: float
) -> None:
    steps = Steps(0.01, 0.00005)
    loads = [
        load(name, capacity_of(lengths, steps, 1 << 16), lengths, seed, FEWER_SECONDS)
        for name, lengths, seed in (("one", one, 1), ("other", other, 2))
    ]
    together = run(*loads, steps=steps, tenant_weights=weights)
    assert served(together, "one") / served(together, "other") == pytest.approx(ratio, rel=0.12)
