"""The same load on many configurations, the figures of each run, and the cheapest that meets its objectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

import msgspec

from services.scheduler.state.policy import Policy
from services.simulator.hardware import StepTime
from services.simulator.simulation import Delays, Simulation
from shared.messages import WorkerCapacity
from shared.metrics import ModelWork, Slo, Summary, rate, summarise
from shared.workload import LoadRequest

QS = (50.0, 90.0, 95.0, 99.0)
VOCAB_SIZE = 1 << 16


class SimulatedOutcome(msgspec.Struct, frozen=True):
    """Seconds, tokens, shares; rates per second of virtual time from the first arrival to the last token."""

    completed: int
    rejected: int
    duration: float
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2el: Summary
    request_throughput: float
    goodput: float
    attainment: float  # share of all requests that met the objectives; a rejected one did not
    output_throughput: float
    total_token_throughput: float
    hit_rate: float  # of the prompts' tokens, those found in a prefix cache
    num_preemptions: int
    busy: float  # mean share of time in which a worker computed
    imbalance: float  # tokens of the busiest worker over the mean; 1 is even
    mfu: float  # 0 where the device's rate is not known
    mean_batch: float  # sequences in a step


def outcome_of(run: Simulation, slo: Slo, peak_flops: float = 0.0) -> SimulatedOutcome:
    """Of a run that has ended."""
    records = list(run.observer.records.values())
    done = [record for record in records if record.is_finished]
    start = min((record.start for record in records), default=0.0)
    duration = max((record.last for record in done), default=start) - start
    num_output = sum(record.num_tokens for record in done)
    num_prompt = sum(record.num_prompt_tokens for record in done)
    num_good = sum(slo.met(record.ttft, record.tpot, record.e2el) for record in done)
    counters, workers = run.core.counters, run.workers.values()
    busy = [worker.busy for worker in workers]
    num_steps = sum(worker.num_steps for worker in workers)
    capacity, usage = duration * len(workers), run.usage
    flops = run.model.flops(usage.num_tokens, usage.num_samples, usage.num_pairs) if run.model is not None else 0.0
    return SimulatedOutcome(
        completed=len(done),
        rejected=run.observer.num_rejected,
        duration=duration,
        ttft=_summary(record.ttft for record in done),
        tpot=_summary(record.tpot for record in done),
        itl=run.observer.gaps.summary(QS),
        e2el=_summary(record.e2el for record in done),
        request_throughput=rate(len(done), duration),
        goodput=rate(num_good, duration),
        attainment=num_good / len(records) if records else 0.0,
        output_throughput=rate(num_output, duration),
        total_token_throughput=rate(num_output + num_prompt, duration),
        hit_rate=sum(record.num_cached_tokens for record in done) / num_prompt if num_prompt else 0.0,
        num_preemptions=counters.num_preemptions,
        busy=sum(busy) / capacity if capacity else 0.0,
        imbalance=max(busy) * len(busy) / sum(busy) if sum(busy) else 1.0,
        mfu=flops / (capacity * peak_flops) if capacity and peak_flops else 0.0,
        mean_batch=usage.num_sequences / num_steps if num_steps else 0.0,
    )


def _summary(values: Iterable[float | None]) -> Summary:
    return summarise((value for value in values if value is not None), QS)


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


class SweepResult(msgspec.Struct, frozen=True):
    configuration: Configuration
    outcome: SimulatedOutcome


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
    run.run(scenario.load(configuration.num_workers))
    return SweepResult(configuration, outcome_of(run, scenario.slo, scenario.peak_flops))


def cheapest(
    results: Iterable[SweepResult], target: float, cost: Callable[[Configuration], float]
) -> list[SweepResult]:
    """Those in which at least a share `target` of the requests met the objectives: the least cost first, then the best
    attainment.  Empty where none does."""
    good = [result for result in results if result.outcome.attainment >= target]
    return sorted(good, key=lambda result: (cost(result.configuration), -result.outcome.attainment))
