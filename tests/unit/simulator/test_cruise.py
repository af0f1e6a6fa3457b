"""Runs in which steps are taken without the core are those in which it is asked each time, digit for digit."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from services.scheduler.invariants import check
from services.scheduler.scheduler import Scheduler
from services.scheduler.state.policy import Policy
from services.simulator import simulation
from services.simulator.cruise import Cruise
from services.simulator.simulation import Delays, Simulation
from services.simulator.sweep import outcome_of
from shared.messages import WorkerCapacity
from shared.metrics import Slo
from shared.metrics.steps import StepWork
from shared.workload import LoadRequest, RandomLengths, arrival_times, at_times, random_requests

VOCAB = 1 << 16
LENGTHS = RandomLengths(150, 80, prefix_len=48, range_ratio=0.9)


class Seconds:
    """A step takes so long for itself, per token, and per token of context."""

    def seconds(self, work: StepWork, start: float, worker: int) -> float:
        return 0.01 + 0.0001 * work.num_tokens + 1e-6 * work.num_context


def load(count: int, rate: float, lengths: RandomLengths, seed: int, tenants: tuple[str, ...]) -> list[LoadRequest]:
    rng = Random(seed)
    requests = at_times(random_requests(count, lengths, VOCAB, rng), arrival_times(count, rate, 1.0, rng))
    return [msgspec.structs.replace(request, tenant=rng.choice(tenants)) for request in requests]


CASES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "few requests": {"rate": 1.0, "count": 30},
    "many workers": {"workers": 6, "rate": 60.0, "count": 300},
    "round robin": {"workers": 3, "routing_policy": "round_robin"},
    "least loaded": {"workers": 3, "routing_policy": "least_loaded"},
    "few blocks": {"blocks": 40, "count": 80},
    "an old cache that is given away": {"workers": 2, "blocks": 90, "rate": 6.0},
    "no cache": {"enable_prefix_caching": False, "blocks": 60},
    "tenants": {"tenants": ("one", "other"), "rows": 6, "rate": 30.0},
    "weights": {"tenants": ("one", "other", "third"), "tenant_weights": "one=3,other=0.7", "rows": 6, "workers": 2},
    "priorities": {"scheduling_policy": "priority", "rows": 4},
    "a small budget": {"max_num_batched_tokens": 24, "rows": 32},
    "fewer tokens than rows": {"max_num_batched_tokens": 5, "rows": 16, "count": 40},
    "outputs that end at the model's length": {"lengths": RandomLengths(200, 600, range_ratio=0.5), "count": 40},
}


def run(
    count: int = 120, rate: float = 12.0, lengths: RandomLengths = LENGTHS, tenants: tuple[str, ...] = ("",),
    workers: int = 1, blocks: int = 256, rows: int = 64, seed: int = 1, **policy: Any,
) -> Simulation:  # fmt: skip
    capacity = WorkerCapacity(blocks, 16, rows, 640, VOCAB, "m", "float32", "cpu")
    chosen = Policy(max_num_queued_reqs=1 << 20, max_num_queued_tokens=1 << 40, **policy)
    made = Simulation(chosen, capacity, workers, Seconds(), Delays())
    made.run(iter(load(count, rate, lengths, seed, tenants)))
    check(made.core)
    return made


def state(run: Simulation) -> list[Any]:
    """All that a run has left, pools in the order in which blocks would be given next."""
    core = run.core
    pools = [replica.pool for replica in core.replicas.values()]
    return [
        outcome_of(run, Slo(ttft=0.1)),
        run.observer.records,
        run.end,
        run.usage,
        [(worker.free_at, worker.busy, worker.num_steps) for worker in run.workers.values()],
        [(pool.hashes, pool.generations, pool.hash_generations, list(pool.available)) for pool in pools],
        [(pool.num_evictions, list(pool.evicted._times.items())) for pool in pools],
        [
            (replica.num_steps, core._batchers[replica.instance]._visitors._left, replica.free_rows)
            for replica in core.replicas.values()
        ],
        core.counters,
        [core.shares.served(record.tenant) for record in run.observer.records.values()],
    ]


class Odometer:
    """Counts the steps that were taken without the core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_steps = 0
        original = Cruise.settle

        def settle(cruise: Cruise) -> None:
            self.num_steps += cruise.num_steps
            original(cruise)

        monkeypatch.setattr(Cruise, "settle", settle)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_same_run(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    odometer = Odometer(monkeypatch)
    cruised = state(run(seed=seed, **CASES[name]))
    assert odometer.num_steps > 20, "else nothing is compared"
    monkeypatch.setattr(simulation, "cruise_of", lambda *_: None)
    asked = state(run(seed=seed, **CASES[name]))
    for one, other in zip(cruised, asked, strict=True):
        assert one == other


def test_most_steps_of_a_quiet_worker_are_taken_without_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    odometer = Odometer(monkeypatch)
    quiet = run(**CASES["few requests"])
    assert odometer.num_steps > 0.8 * quiet.workers["w0"].num_steps


def test_what_is_in_flight_is_what_the_core_would_have_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the core is asked again, its state is that of a run in which it was asked at every step."""

    def look(core: Scheduler, seen: list[Any]) -> None:
        check(core)
        for replica in core.replicas.values():
            steps = [(step.step_id, ids(step), step.num_computed, step.num_scheduled, step.num_samples, step.new_blocks)
                     for step in replica.in_flight]  # fmt: skip
            tables = [(s.token_ids, s.num_computed_tokens, s.block_ids, s.block_generations, s.num_registered_blocks)
                      for s in replica.running]  # fmt: skip
            seen.append((core.clock.now, steps, msgspec.msgpack.encode(tables)))

    def ids(step: Any) -> list[str]:
        return [sequence.request.request_id for sequence in step.sequences]

    def looked() -> dict[float, Any]:
        seen: list[Any] = []
        original = Scheduler.apply

        def apply(core: Scheduler, instance: str, result: Any, now: float) -> bool:
            core.clock.now = now
            look(core, seen)
            return original(core, instance, result, now)

        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "apply", apply)
            run(blocks=60, count=60)
        return {now: rest for now, *rest in seen}

    cruised = looked()
    monkeypatch.setattr(simulation, "cruise_of", lambda *_: None)
    asked = looked()
    assert len(cruised) < len(asked)
    assert all(asked[now] == found for now, found in cruised.items())
