"""`pageant simulate`: what a load would need, from the scheduler's own decisions and a model of step time."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec
from tqdm import tqdm

from services.cli.bench.options import SimulateOptions
from services.cli.command_line.workloads import WorkloadOptions, requests_of
from services.cli.display.tables import aligned
from services.scheduler.lifecycle.routing import SCORES
from services.scheduler.state.policy import Policy
from services.simulator.fitting import Scattered, errors, fit, read_recording
from services.simulator.hardware import DEVICES, Device, Roofline, StepTime, num_blocks, shape_of
from services.simulator.sweep import (
    VOCAB_SIZE,
    Configuration,
    Scenario,
    SweepResult,
    cheapest,
    configurations,
    simulate,
)
from shared.errors import ConfigError
from shared.metrics import ModelWork, Slo, parse_slo
from shared.workload import LoadRequest

MANY_OBJECTS = 200_000  # allocations between looks for garbage, of which there is next to none


def run(options: SimulateOptions, workload: WorkloadOptions) -> int:
    """Simulate every combination, print the tables; returns the exit status."""
    try:
        slo, model = parse_slo(options.goodput), shape_of(options.model).work()
        if options.device not in DEVICES:
            raise ConfigError(f"no figures for {options.device}; there are some for {', '.join(DEVICES)}")
        device = DEVICES[options.device]
        scenario = scenario_of(options, workload, slo, model, device)
        every = combinations(options, model, device)
    except (ConfigError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    begin, results = time.perf_counter(), []
    gc.set_threshold(MANY_OBJECTS, 20, 100)
    for configuration in tqdm(every, desc="configurations", disable=len(every) < 2):
        results.append(simulate(scenario, configuration))
    elapsed = time.perf_counter() - begin
    report(results, options, slo, elapsed)
    if options.json is not None:
        plain = [{"configuration": result.configuration, **msgspec.to_builtins(result.outcome, str_keys=True)}
                 for result in results]  # fmt: skip
        written = msgspec.json.encode({"results": plain, "wall_seconds": elapsed})
        options.json.write_bytes(msgspec.json.format(written))
    if options.plot is not None:
        from services.cli.display.plots import plot_simulation

        plot_simulation(results, options.plot)
    return 0


def scenario_of(
    options: SimulateOptions, workload: WorkloadOptions, slo: Slo, model: ModelWork, device: Device
) -> Scenario:
    """Raises ValueError or OSError on a recording that cannot be read."""
    step_time: StepTime = Roofline(device, model)
    if options.recorded is not None:
        step_time = fitted(options.recorded)
    policy = Policy(
        enable_prefix_caching=options.enable_prefix_caching,
        max_num_queued_reqs=options.max_num_queued_reqs,
        max_num_queued_tokens=1 << 40,
    )

    def load(num_workers: int) -> Iterator[LoadRequest]:
        speed = workload.trace_speed * (num_workers if options.load_per_worker else 1)
        return requests_of(workload, VOCAB_SIZE, max_model_len=options.max_model_len, trace_speed=speed)

    return Scenario(
        load=load,
        step_time=step_time,
        policy=policy,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        slo=slo,
        model=model,
        peak_flops=device.matrix_rate if options.recorded is None else 0.0,
    )


def fitted(recording: Path) -> StepTime:
    """Print how far off a fit to half of the steps is for the others; returns a fit to all, with the steps' scatter."""
    steps = read_recording(recording)
    error = errors(fit(steps[::2]), steps[1::2])
    half, most = (100 * error.percentiles[q] for q in (50.0, 90.0))
    click.echo(
        f"step times fitted to {len(steps)} recorded steps; a fit to every other step predicts half of the remaining "
        f"steps within {half:.1f} %, and nine in ten within {most:.1f} %",
        err=True,
    )
    return Scattered(fit(steps), steps)


def combinations(options: SimulateOptions, model: ModelWork, device: Device) -> list[Configuration]:
    """Raises ConfigError where the model does not fit the device."""
    if unknown := set(options.routing_policy) - set(SCORES):
        raise ConfigError(f"no routing policy {', '.join(unknown)}; there are {', '.join(SCORES)}")

    def blocks(size: int) -> Sequence[int]:
        if options.num_blocks:
            return options.num_blocks
        if options.recorded is not None:
            raise ConfigError("--recorded says nothing of memory: give --num-blocks, as the recorded worker had them")
        return [num_blocks(device, model, size, options.gpu_memory_utilization)]

    return configurations(
        options.workers, blocks, options.block_size, options.max_num_batched_tokens, options.routing_policy
    )


HEAD = ("workers", "blocks", "size", "budget", "routing", "TTFT p50", "p99", "ITL p50", "p99", "TPOT p50", "req/s",
        "tok/s", "hits", "preempted", "rejected", "busy", "uneven", "MFU", "in SLO", "goodput")  # fmt: skip


def report(results: list[SweepResult], options: SimulateOptions, slo: Slo, elapsed: float) -> None:
    """The table of all, and of those that meet the objectives."""
    click.echo(aligned(HEAD, [cells(result) for result in results], left=(4,)))
    num_requests = sum(result.outcome.completed + result.outcome.rejected for result in results)
    per_hour = 3600 * num_requests / elapsed
    click.echo(f"\n{num_requests} requests in {elapsed:.1f} s: {per_hour:,.0f} an hour; latencies in milliseconds")
    if not slo:
        return
    good = cheapest(results, options.attainment, lambda c: c.num_workers * options.cost_per_worker)
    click.echo(f"\n{slo} met by {100 * options.attainment:g} % of requests, the cheapest first:")
    if not good:
        click.echo("no configuration that was tried")
        return
    rows = [(f"{r.configuration.num_workers * options.cost_per_worker:g}", *cells(r)) for r in good]
    click.echo(aligned(("cost", *HEAD), rows, left=(5,)))


def cells(result: SweepResult) -> tuple[str, ...]:
    c, o = result.configuration, result.outcome
    return (
        str(c.num_workers), str(c.num_blocks), str(c.block_size), str(c.max_num_batched_tokens), c.routing_policy,
        _ms(o.ttft.median), _ms(o.ttft.percentiles[99.0]), _ms(o.itl.median), _ms(o.itl.percentiles[99.0]),
        _ms(o.tpot.median), f"{o.request_throughput:.2f}", f"{o.output_throughput:.0f}", f"{100 * o.hit_rate:.1f} %",
        str(o.num_preemptions), str(o.rejected), f"{100 * o.busy:.0f} %", f"{o.imbalance:.2f}",
        f"{100 * o.mfu:.1f} %", f"{100 * o.attainment:.1f} %", f"{o.goodput:.2f}",
    )  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 10 else f"{1000 * seconds:.0f}"
