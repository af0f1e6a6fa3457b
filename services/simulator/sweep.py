"""The same load on many configurations, and the cheapest of them that meets its objectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import msgspec

from services.scheduler.state.policy import Policy
from services.simulator.outcome import SimulatedOutcome, outcome_of
from services.simulator.simulation import Delays, LoadSample, Simulation
from services.simulator.step_time import StepTime
from shared.messages import WorkerCapacity
from shared.metrics import ModelWork, Slo
from shared.workload import LoadRequest

VOCAB_SIZE = 1 << 16


class Configuration(msgspec.Struct, frozen=True):
    """What an operator chooses, under the settings' names; blocks are each worker's."""

    num_workers: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    routing_policy: str


class Scenario(msgspec.Struct, frozen=True):
    """What is given: the load, how fast a worker is, what is asked of it."""

    load: Callable[[int], Iterator[LoadRequest]]  # of so many workers, since it may grow with them
    step_time: StepTime
    policy: Policy
    max_num_seqs: int
    max_model_len: int
    delays: Delays = Delays()
    slo: Slo = Slo()
    model: ModelWork | None = None
    peak_flops: float = 0.0
    sample_every: float = 0.0


class SweepResult(msgspec.Struct, frozen=True):
    configuration: Configuration
    outcome: SimulatedOutcome
    samples: Sequence[LoadSample] = ()


def configurations(
    workers: Iterable[int], blocks: Callable[[int], Iterable[int]], sizes: Iterable[int], budgets: Iterable[int],
    policies: Iterable[str],
) -> list[Configuration]:  # fmt: skip
    """All combinations; `blocks` says how many blocks of a size are to be tried."""
    pairs = [(count, size) for size in sizes for count in blocks(size)]
    every = product(workers, pairs, budgets, policies)
    return [Configuration(number, count, size, budget, policy) for number, (count, size), budget, policy in every]


def simulate(scenario: Scenario, configuration: Configuration) -> SweepResult:
    """One configuration under the scenario's load, from the first request to the last token."""
    capacity = WorkerCapacity(
        num_blocks=configuration.num_blocks,
        block_size=configuration.block_size,
        max_num_seqs=scenario.max_num_seqs,
        max_model_len=scenario.max_model_len,
        vocab_size=VOCAB_SIZE,
        model="simulated",
        dtype="bfloat16",
        device="simulated",
    )
    policy = replace(
        scenario.policy,
        max_num_batched_tokens=configuration.max_num_batched_tokens,
        routing_policy=configuration.routing_policy,
    )
    run = Simulation(policy, capacity, configuration.num_workers, scenario.step_time, scenario.delays, scenario.model)
    run.run(scenario.load(configuration.num_workers), scenario.sample_every)
    return SweepResult(configuration, outcome_of(run, scenario.slo, scenario.peak_flops), run.samples)


def cheapest(
    results: Iterable[SweepResult], target: float, cost: Callable[[Configuration], float]
) -> list[SweepResult]:
    """Those in which at least a share `target` of the requests met the objectives: the least cost first, then the best
    attainment.  Empty where none does."""
    good = [result for result in results if result.outcome.attainment >= target]
    return sorted(good, key=lambda result: (cost(result.configuration), -result.outcome.attainment))
