"""How well the simulator foretells this machine: real runs and simulated ones of the same load, side by side.

    scripts/bench_simulator [--check] [--requests 200] [--seconds 75] [--model models/pageant-stories]

A private troupe serves; its worker writes down its steps (`record_steps`).  Three loads, idle, busy and overloaded, are
sent by the load generator and given to the simulator: the same requests at the same times.  The error is that of the
simulated figure.

Before and after each of them two runs calibrate: one request at a time tells what the way to the worker and back takes,
which is its TTFT without the step that the worker noted, and a mixed load at about three quarters of the capacity tells
what steps take and how they scatter.  A machine that others use too changes its speed from one minute to the next: by
how much the steps of the load itself took longer in all than those around it is said and counted in.  Which steps there
were, the simulator is not told.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import uvloop

from scripts.bench.report import Line, add_check, finish
from services.cli.bench.generator import Generator, lateness
from services.cli.bench.grpc_backend import GrpcBackend
from services.cli.bench.outcome import Outcome
from services.cli.private import with_private_troupe
from services.scheduler.policy import Policy
from services.simulator.fitting import Fitted, fit, read_recording
from services.simulator.outcome import Outcome as Foretold
from services.simulator.outcome import outcome_of
from services.simulator.scatter import Scattered
from services.simulator.simulation import Delays, Simulation
from services.simulator.step_time import StepTime
from shared.config import Settings, load_settings
from shared.messages import WorkerCapacity
from shared.metrics import Slo, Summary, percentile, rate, summarise
from shared.metrics.steps import RecordedStep
from shared.workload import LoadRequest, RandomLengths, arrival_times, at_times, random_requests

LENGTHS = RandomLengths(input_len=160, output_len=64, range_ratio=0.75)
LOADS = {"idle": 0.15, "busy": 0.6, "overloaded": 1.5}  # of the capacity
CALIBRATION_LOAD = 0.75
NUM_CALIBRATION = 60  # requests, before each load and after
NUM_ALONE = 12  # of those sent one after the other, likewise
MIN_REQUESTS = 50  # of a load
MAX_ERROR = 15.0  # percent
VOCAB_SIZE = 1 << 16


class Measured(msgspec.Struct):
    """One real run."""

    requests: Sequence[LoadRequest]
    ttft: Summary
    output_throughput: float
    num_late: int


class Calibration(msgspec.Struct):
    """What was seen around one load."""

    ways: list[float] = []  # there and back, seconds
    steps: list[RecordedStep] = []


class Machine:
    """A troupe that serves, and the recording of its worker."""

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
        outcomes = await Generator(self._backend).send(requests, lambda _: None)
        failed = [outcome.error for outcome in outcomes if not outcome.succeeded]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        num_late, _ = lateness(outcomes)
        return Measured(requests, _ttfts(outcomes), _throughput(outcomes), num_late)

    async def calibrate(self, found: Calibration, capacity: float) -> None:
        """Add what is to be seen now."""
        found.ways += await self.ways(NUM_ALONE)
        self.new_steps()
        await self.run(self.requests(NUM_CALIBRATION, CALIBRATION_LOAD * capacity))
        found.steps += self.new_steps()

    async def ways(self, count: int) -> list[float]:
        """Of requests one after the other, what of their TTFT was not their step."""
        found = []
        for request in self.requests(count, float("inf")):
            self.new_steps()
            (outcome,) = await Generator(self._backend).send([request], lambda _: None)
            first = self.new_steps()[0]
            if first.num_tokens == request.num_prompt_tokens and outcome.timeline.ttft is not None:
                found.append(outcome.timeline.ttft - first.seconds)
        return found


def _ttfts(outcomes: Sequence[Outcome]) -> Summary:
    return summarise(outcome.timeline.ttft or 0.0 for outcome in outcomes)


def _throughput(outcomes: Sequence[Outcome]) -> float:
    return rate(sum(outcome.num_output_tokens for outcome in outcomes), max(outcome.end for outcome in outcomes))


async def compare(settings: Settings, count: int, seconds: float) -> list[Line]:
    """`count` requests of each load, or as many as come in so many seconds."""
    backend = GrpcBackend(f"{settings.host}:{settings.port}", {"temperature": 0.0, "ignore_eos": True})
    try:
        model = await backend.model(60.0)
        machine = Machine(backend, Path(settings.record_steps), model.vocab_size)
        await machine.run(machine.requests(50, float("inf")))  # warm-up
        at_once = await machine.run(machine.requests(count, float("inf")))
        capacity = at_once.output_throughput / LENGTHS.output_len
        (num_blocks,) = await backend.num_blocks()
        lines = [Line("capacity", capacity, "requests/s")]
        for name, share in LOADS.items():
            around, per_second = Calibration(), share * capacity
            await machine.calibrate(around, capacity)
            number = min(count, max(MIN_REQUESTS, round(seconds * per_second)))
            measured = await machine.run(machine.requests(number, per_second))
            steps = machine.new_steps()
            await machine.calibrate(around, capacity)
            step_time = fit(around.steps)
            drift = slowness(step_time, steps) / slowness(step_time, around.steps)
            lines.append(Line(f"{name}: steps took, of those around it", drift, "x", note=f"{len(steps)} steps"))
            foretold = simulated(
                settings, num_blocks, model.max_model_len, Scattered(step_time, around.steps, drift),
                delays_of(around.ways), measured.requests,
            )  # fmt: skip
            lines += lines_of(name, measured, foretold)
        return lines
    finally:
        await backend.close()


def slowness(step_time: Fitted, steps: Sequence[RecordedStep]) -> float:
    """How many times as long steps took in all as a model says."""
    return sum(step.seconds for step in steps) / sum(step_time.seconds(step.work) for step in steps)


def delays_of(ways: Sequence[float]) -> Delays:
    """The way there and back, of requests that met nobody; two thirds of it is the way there."""
    way = max(0.0, percentile(ways, 50))
    return Delays(inbound=way * 2 / 3, inbound_per_token=0.0, outbound=way / 3)


def simulated(
    settings: Settings, num_blocks: int, max_model_len: int, step_time: StepTime, delays: Delays,
    requests: Sequence[LoadRequest],
) -> Foretold:  # fmt: skip
    """The same load in virtual time."""
    capacity = WorkerCapacity(
        num_blocks, settings.block_size, settings.max_num_seqs, max_model_len, VOCAB_SIZE, "m", "float32", "cpu"
    )
    policy = Policy(max_num_batched_tokens=settings.max_num_batched_tokens)
    run = Simulation(policy, capacity, 1, step_time, delays)
    run.run(iter(requests))
    return outcome_of(run, Slo())


def lines_of(name: str, measured: Measured, foretold: Foretold) -> list[Line]:
    pairs = (
        ("TTFT p50", 1000 * measured.ttft.median, 1000 * foretold.ttft.median, "ms"),
        ("TTFT p99", 1000 * measured.ttft.percentiles[99.0], 1000 * foretold.ttft.percentiles[99.0], "ms"),
        ("throughput", measured.output_throughput, foretold.output_throughput, "tok/s"),
    )
    late = f"; {measured.num_late} sent late" if measured.num_late else ""
    return [
        Line(f"{name}: {what}, error", 100 * abs(there / here - 1), "%", at_most=MAX_ERROR,
             note=f"measured {here:.1f} {unit}, simulated {there:.1f}{late}")
        for what, here, there, unit in pairs
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--requests", type=int, default=200, help="of each load, at most")
    parser.add_argument("--seconds", type=float, default=75, help="of arrivals in each load, at most")
    parser.add_argument("--model", default="models/pageant-stories")
    args = parser.parse_args()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="pageant-bench-") as directory:
        own = {"model": args.model, "log_level": "warning", "record_steps": f"{directory}/steps.jsonl"}

        def work(settings: Settings) -> int:
            lines.extend(uvloop.run(compare(settings, args.requests, args.seconds)))
            return 0

        status = with_private_troupe(load_settings(own, environ={}), work)
    return status or finish(lines, check=args.check, title="what the simulator foretold, against real runs")


if __name__ == "__main__":
    sys.exit(main())
