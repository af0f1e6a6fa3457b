"""`pageant bench serve` at six rates, idle to twice the capacity, beside what the services say of the same requests.

    scripts/bench_serve_rates [--check] [--seconds 15] [--model models/pageant-stories] [--plot rates.png]

All services are real processes with the bundled model.  The capacity is that of a run in which everything is due at
once.  Of each rate the load generator's figures stand beside the services' own, from the gateway's log of the same
requests: TTFT, TPOT, and, for information, the longest gap between two outputs of each, in which a message may be late
by itself.  The services cannot know when a request was meant to be sent, only when it left (`x-request-start`), so here
the generator's TTFT too counts from when it left; the table before counts from when it was due.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from scripts.bench.common.deployment import LocalDeployment, with_worker
from scripts.bench.common.host import awake
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.tracing.requests import ended
from services.cli.bench.generator import RequestOutcome, lateness
from services.cli.bench.grpc_backend import NUM_CHANNELS
from services.cli.bench.options import ServeOptions
from services.cli.bench.report import Report
from services.cli.bench.serve import measure, rates_table
from services.cli.command_line.workloads import WorkloadOptions
from shared.metrics import summarise

SHARES = (0.05, 0.25, 0.5, 0.8, 1.2, 2.0)  # of the capacity
LENGTHS: dict[str, Any] = {"random_input_len": 736, "random_output_len": 64, "random_range_ratio": 0.25}
MIN_REQUESTS = 20  # of a rate
NUM_AT_ONCE = 60  # for the capacity
MAX_ERROR = {"TTFT": 2.0, "TPOT": 2.0}  # percent
QS = (50.0, 99.0)
SETTLED = 0.3  # seconds after which the last lines are written
FIGURES: Mapping[str, tuple[str, Callable[[RequestOutcome], float | None]]] = {  # the log's field, the generator's
    "TTFT": ("ttft_ms", lambda outcome: outcome.timeline.times[0] - outcome.sent),
    "TPOT": ("tpot_ms", lambda outcome: outcome.timeline.tpot),
    "longest gap": ("itl_max_ms", lambda outcome: max(outcome.timeline.itl)),
}
Lines = Sequence[Mapping[str, Any]]  # of the log


class RatesBench:
    """One deployment, and its load."""

    def __init__(self, running: LocalDeployment, seconds: float) -> None:
        self._running = running
        self._seconds = seconds
        self._seed = 0

    async def measure(self, per_second: float, count: int) -> tuple[Report, Lines]:
        """New requests at every call, and the log's lines about them.  Raises RuntimeError where one failed."""
        self._running.check()
        self._seed += 1
        options = ServeOptions(address=self._running.address, num_warmups=NUM_CHANNELS)
        load = WorkloadOptions(request_rate=per_second, num_prompts=count, seed=self._seed, **LENGTHS)
        (report,) = await measure(options, load, {})
        if num_failed := count - len(report.completed):
            raise RuntimeError(f"{num_failed} requests failed")
        await asyncio.sleep(SETTLED)
        return report, list(ended(self._running.log_of("gateway")))[-count:]

    async def rates(self) -> tuple[list[Report], list[Result]]:
        at_once, _ = await self.measure(math.inf, NUM_AT_ONCE)
        capacity = NUM_AT_ONCE / at_once.duration
        reports, lines = [], [Result("capacity", capacity, "requests/s")]
        for rate in (share * capacity for share in SHARES):
            report, logged = await self.measure(rate, max(MIN_REQUESTS, round(rate * self._seconds)))
            reports.append(report)
            lines += beside(f"{rate:.2f}/s", report.outcomes, logged)
        return reports, lines


def beside(name: str, outcomes: Sequence[RequestOutcome], logged: Lines) -> list[Result]:
    """The generator's figures and the services' of the same requests; the error is that between the two."""
    num_late, worst = lateness(outcomes)
    late = f"; {num_late} sent late, the worst by {1000 * worst:.0f} ms" if num_late else ""
    lines = []
    for figure, (field, seen) in FIGURES.items():
        theirs = summarise((line[field] for line in logged if line[field] is not None), QS)
        ours = summarise((1000 * value for value in map(seen, outcomes) if value is not None), QS)
        for q in QS:
            client, services = ours.percentiles[q], theirs.percentiles[q]
            note = f"client {client:.2f} ms, services {services:.2f} ms{late}"
            error = 100 * abs(client / services - 1) if services else None
            bound = MAX_ERROR.get(figure)
            lines.append(Result(f"{name}: {figure} p{q:g}, difference", error, "%", at_most=bound, note=note))
    return lines


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=15, help="of arrivals at each rate")
    parser.add_argument("--model", default="models/pageant-stories")
    parser.add_argument("--plot", type=Path, help="latency over rate, throughput and latency, and every run: a PNG")
    args = parser.parse_args()
    with awake(), with_worker(model=args.model) as running:
        reports, lines = uvloop.run(RatesBench(running, args.seconds).rates())
    print(rates_table(reports))
    if args.plot is not None:
        from services.cli.display.plots import plot_measured

        plot_measured(reports, args.plot)
    return finish(lines, check=args.check, title="the load generator's figures and the services' of the same requests")
