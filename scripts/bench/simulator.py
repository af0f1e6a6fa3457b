"""How well the simulator foretells this machine: real runs and simulated ones of the same load, side by side.

    scripts/bench_simulator [--check] [--requests 1200] [--seconds 180] [--tries 4] [--model models/pageant-stories]

A private deployment serves; its worker writes down its steps (`record_steps`).  Three loads, idle, busy and
overloaded, are sent by the load generator and given to the simulator: the same requests at the same times.  The error
is that of the simulated figure.

Before and after each of them two runs of other requests calibrate: one at about three quarters of the capacity, and one
at the load's own rate, of more requests where that is more than can be served, so that all rows are taken.  They tell
what steps take and how they scatter; and the last of them, what the ways to the scheduler and back take: what of a
request's TTFT was neither waiting nor prefill, by its account.  A machine that others use too changes its speed from
one minute to the next: by how much the steps of the load itself took longer in all than those around it is said and
counted in.  Which steps there were, the simulator is not told.

On a machine where all services share the processors, and the generator too, a request that comes takes time from the
step that is under way: how much, the fit finds from when the requests of the calibration were sent.

Processors are kept from halting (`scripts/bench/common/host.py`).  A load during which the host took more than 2 % of
them, or a fifth of one for half a second, is sent again, so many times; of all of them the quietest counts.
"""

from __future__ import annotations

import argparse
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import uvloop

from scripts.bench.common.host import awake, in_quiet
from scripts.bench.common.report import Result, bench_parser, finish
from services.cli.bench.generator import Generator, RequestOutcome, lateness
from services.cli.bench.grpc_backend import GrpcBackend
from services.cli.supervision.private import with_private_deployment
from services.scheduler.state.policy import Policy
from services.simulator.fitting import Fitted, Scattered, fit, read_recording, undisturbed
from services.simulator.hardware import StepTime
from services.simulator.simulation import Delays, Simulation
from services.simulator.sweep import SimulatedOutcome as Foretold
from services.simulator.sweep import outcome_of
from shared.config import Settings, load_settings
from shared.messages import WorkerCapacity
from shared.metrics import Slo, Summary, percentile, rate, summarise
from shared.metrics.steps import RecordedStep
from shared.tracing.phases import QUEUE, Phase
from shared.workload import LoadRequest, RandomLengths, arrival_times, at_times, random_requests

LENGTHS = RandomLengths(input_len=160, output_len=64, range_ratio=0.75)
LOADS = {"idle": 0.15, "busy": 0.6, "overloaded": 2.0}  # of the capacity
CALIBRATION_LOAD = 0.75
NUM_CALIBRATION = 240  # requests of each run that calibrates
NUM_AT_ONCE = 300  # for the capacity, and to calibrate where there are more than can be served
MIN_REQUESTS = 50  # of a load
MAX_ERROR = 15.0  # percent
VOCAB_SIZE = 1 << 16


class Measured(msgspec.Struct):
    """One real run."""

    requests: Sequence[LoadRequest]
    ttft: Summary
    output_throughput: float
    num_late: int
    ways: list[float]
    sent: list[float]  # seconds of the machine's steady clock


class Calibration(msgspec.Struct):
    """What was seen around one load."""

    ways: list[float] = []  # there and back, seconds
    steps: list[RecordedStep] = []
    arrivals: list[int] = []  # during each step


class Machine:
    """A deployment that serves, and the recording of its worker."""

    def __init__(self, backend: GrpcBackend, recording: Path, vocab_size: int) -> None:
        self._backend = backend
        self._recording = recording
        self._vocab_size = vocab_size
        self._seed = 0
        self._num_read = 0  # steps

    def new_steps(self) -> list[RecordedStep]:
        """Those recorded since the last call."""
        steps = read_recording(self._recording)
        new, self._num_read = steps[self._num_read :], len(steps)
        return new

    def requests(self, count: int, per_second: float) -> list[LoadRequest]:
        """New ones at every call."""
        self._seed += 1
        rng = Random(self._seed)
        made = random_requests(count, LENGTHS, self._vocab_size, rng)
        return at_times(made, arrival_times(count, per_second, 1.0, rng))

    async def run(self, requests: Sequence[LoadRequest]) -> Measured:
        generator = Generator(self._backend)
        outcomes = await generator.send(requests, lambda _: None)
        failed = [outcome.error for outcome in outcomes if not outcome.succeeded]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        num_late, _ = lateness(outcomes)
        sent = [generator.begin + outcome.sent for outcome in outcomes]
        ttft = summarise(outcome.timeline.ttft or 0.0 for outcome in outcomes)
        num_tokens = sum(outcome.num_output_tokens for outcome in outcomes)
        throughput = rate(num_tokens, max(outcome.end for outcome in outcomes))
        return Measured(requests, ttft, throughput, num_late, [way(outcome) for outcome in outcomes], sent)

    async def calibrate(self, found: Calibration, capacity: float, per_second: float) -> None:
        """Add what is to be seen now."""
        self.new_steps()
        usual = await self.run(self.requests(NUM_CALIBRATION, CALIBRATION_LOAD * capacity))
        count = NUM_AT_ONCE if per_second > capacity else NUM_CALIBRATION
        measured = await self.run(self.requests(count, per_second))
        found.ways += measured.ways
        steps = self.new_steps()
        found.steps += steps
        found.arrivals += arrivals_during(steps, usual.sent + measured.sent)


def arrivals_during(steps: Sequence[RecordedStep], sent: Sequence[float]) -> list[int]:
    """How many were sent during each step: services and load generator are on one machine and have one clock."""
    times = sorted(sent)
    return [bisect_left(times, step.start + step.seconds) - bisect_left(times, step.start) for step in steps]


def way(outcome: RequestOutcome) -> float:
    """Seconds of a request's TTFT that were neither waiting nor prefill.  Raises RuntimeError where it is unknown."""
    if not outcome.phases or outcome.timeline.ttft is None:
        raise RuntimeError("the server does not say where the time of a request went")
    return outcome.timeline.ttft - sum(outcome.phases.get(phase.label, 0.0) for phase in (*QUEUE, Phase.PREFILL))


class Observed(msgspec.Struct):
    """A load, and what was seen around it."""

    capacity: float  # requests per second
    measured: Measured
    steps: list[RecordedStep]
    around: Calibration


async def observe(machine: Machine, share: float, args: argparse.Namespace) -> Observed:
    """A load of so much of the present capacity: `--requests` of it, or as many as come in `--seconds`."""
    at_once = await machine.run(machine.requests(NUM_AT_ONCE, float("inf")))
    capacity = at_once.output_throughput / LENGTHS.output_len
    per_second, around = share * capacity, Calibration()
    number = min(args.requests, max(MIN_REQUESTS, round(args.seconds * per_second)))
    await machine.calibrate(around, capacity, per_second)
    measured = await machine.run(machine.requests(number, per_second))
    steps = machine.new_steps()
    await machine.calibrate(around, capacity, per_second)
    return Observed(capacity, measured, steps, around)


async def compare(settings: Settings, args: argparse.Namespace) -> list[Result]:
    """All loads, one after the other."""
    address = f"{settings.gateway.host}:{settings.gateway.port}"
    backend = GrpcBackend(address, {"temperature": 0.0, "ignore_eos": True}, explain=True)
    try:
        model = await backend.model(60.0)
        machine = Machine(backend, Path(settings.observation.record_steps), model.vocab_size)
        await machine.run(machine.requests(50, float("inf")))  # warm-up
        (num_blocks,) = await backend.num_blocks()
        lines: list[Result] = []
        for name, share in LOADS.items():
            tried = await in_quiet(partial(observe, machine, share, args), args.tries)
            seen = tried.result
            lines.append(Result(f"{name}: {share:g} of the capacity of", seen.capacity, "requests/s"))
            step_time = fit(seen.around.steps, seen.around.arrivals)
            calm = undisturbed(seen.around.steps, seen.around.arrivals, step_time.per_arrival)
            own = undisturbed(seen.steps, arrivals_during(seen.steps, seen.measured.sent), step_time.per_arrival)
            drift = slowness(step_time, own) / slowness(step_time, calm)
            note = f"{len(seen.steps)} steps; {tried.note}"
            lines.append(Result(f"{name}: steps took, of those around it", drift, "x", note=note))
            lines.append(Result(f"{name}: a request takes from the step it meets", 1000 * step_time.per_arrival, "ms"))
            lines.append(Result(f"{name}: the way there and back", 1000 * percentile(seen.around.ways, 50), "ms"))
            foretold = simulated(
                settings, num_blocks, model.max_model_len, Scattered(step_time, calm, drift),
                delays_of(seen.around.ways, step_time.per_arrival), seen.measured.requests,
            )  # fmt: skip
            lines += lines_of(name, seen.measured, foretold)
        return lines
    finally:
        await backend.close()


def slowness(step_time: Fitted, steps: Sequence[RecordedStep]) -> float:
    """How many times as long steps took in all as a model says."""
    return sum(step.seconds for step in steps) / sum(step_time.seconds(step.work) for step in steps)


def delays_of(ways: Sequence[float], per_arrival: float) -> Delays:
    """Ways there and back as they were; two thirds of their median is the way there, and so is what they scatter."""
    median = max(0.0, percentile(ways, 50))
    scatter = tuple(way - median for way in ways)
    return Delays(
        inbound=median * 2 / 3, inbound_per_token=0.0, outbound=median / 3, per_arrival=per_arrival, scatter=scatter
    )


def simulated(
    settings: Settings, num_blocks: int, max_model_len: int, step_time: StepTime, delays: Delays,
    requests: Sequence[LoadRequest],
) -> Foretold:  # fmt: skip
    """The same load in virtual time."""
    block_size, max_num_seqs = settings.memory.block_size, settings.scheduling.max_num_seqs
    capacity = WorkerCapacity(num_blocks, block_size, max_num_seqs, max_model_len, VOCAB_SIZE, "m", "float32", "cpu")
    policy = Policy(max_num_batched_tokens=settings.scheduling.max_num_batched_tokens)
    run = Simulation(policy, capacity, 1, step_time, delays)
    run.run(iter(requests))
    return outcome_of(run, Slo())


def lines_of(name: str, measured: Measured, foretold: Foretold) -> list[Result]:
    pairs = (
        ("TTFT p50", 1000 * measured.ttft.median, 1000 * foretold.ttft.median, "ms"),
        ("TTFT p99", 1000 * measured.ttft.percentiles[99.0], 1000 * foretold.ttft.percentiles[99.0], "ms"),
        ("throughput", measured.output_throughput, foretold.output_throughput, "tok/s"),
    )
    late = f"; {measured.num_late} sent late" if measured.num_late else ""
    return [
        Result(f"{name}: {what}, error", 100 * abs(there / here - 1), "%", at_most=MAX_ERROR,
             note=f"measured {here:.1f} {unit}, simulated {there:.1f}{late}")
        for what, here, there, unit in pairs
    ]  # fmt: skip


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--requests", type=int, default=1200, help="of each load, at most")
    parser.add_argument("--seconds", type=float, default=180, help="of arrivals in each load, at most")
    parser.add_argument("--tries", type=int, default=4, help="of each load, while the host takes much")
    parser.add_argument("--model", default="models/pageant-stories")
    args = parser.parse_args()
    lines: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="pageant-bench-") as directory:
        own = {"model": args.model, "log_level": "warning", "record_steps": f"{directory}/steps.jsonl"}

        def work(settings: Settings) -> int:
            lines.extend(uvloop.run(compare(settings, args)))
            return 0

        with awake():
            status = with_private_deployment(load_settings(own, environ={}), work)
    return status or finish(lines, check=args.check, title="what the simulator foretold, against real runs")
