"""What a simulated run amounts to, in the same metrics as a measured one."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from services.simulator.simulation import Simulation
from shared.metrics import Slo, Summary, rate, summarise

QS = (50.0, 90.0, 95.0, 99.0)


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
        busy=sum(worker.busy for worker in workers) / capacity if capacity else 0.0,
        imbalance=_imbalance([worker.busy for worker in workers]),
        mfu=flops / (capacity * peak_flops) if capacity and peak_flops else 0.0,
        mean_batch=usage.num_sequences / num_steps if num_steps else 0.0,
    )


def _summary(values: Iterable[float | None]) -> Summary:
    return summarise((value for value in values if value is not None), QS)


def _imbalance(busy: list[float]) -> float:
    return max(busy) * len(busy) / sum(busy) if sum(busy) else 1.0
