"""`pageant bench serve` at six rates, idle to twice the capacity, beside what the services say of the same requests.

    scripts/bench_serve_rates [--check] [--seconds 15] [--model models/pageant-stories] [--plot rates.png]

All services are real processes with the bundled model.  The capacity is that of a run in which everything is due at
once.  Of each rate the load generator's figures stand beside the services' own: TTFT of every request from the
gateway's log, gaps between outputs from the histogram in /metrics.  The services cannot know when a request was meant
to be sent, only when it left (`x-request-start`), so here the generator's TTFT too counts from when it left; the table
before counts from when it was due.
Percentiles of gaps come from buckets, so the generator's gaps are put into the same buckets first; means need none.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import BinaryIO
from urllib.request import urlopen

import msgspec
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from scripts.bench.common.deployment import LocalDeployment, with_worker
from scripts.bench.common.host import awake
from scripts.bench.common.report import Result, bench_parser, finish
from services.cli.bench.generator import Generator, RequestOutcome, ServerBackend, lateness
from services.cli.bench.grpc_backend import GrpcBackend
from services.cli.bench.report import Report, RunOptions, report_of
from services.cli.bench.serve import rates_table
from shared.metrics import Acceptance, Summary, summarise
from shared.metrics.histogram import ITL, Histogram, quantile
from shared.workload import LoadRequest, RandomLengths, arrival_times, at_times, random_requests

SHARES = (0.05, 0.25, 0.5, 0.8, 1.2, 2.0)  # of the capacity
LENGTHS = RandomLengths(input_len=736, output_len=64, range_ratio=0.25)  # the bundled model takes 1,024
MIN_REQUESTS = 20  # of a rate
NUM_AT_ONCE = 60  # for the capacity
MAX_ERROR = 2.0  # percent
SAMPLING = {"temperature": 0.0, "ignore_eos": True}
QS = (50.0, 99.0)
SETTLED = 0.3  # seconds after which the last lines are written
FAMILY = "vllm:inter_token_latency_seconds"
Buckets = list[tuple[float, float]]  # upper bound, how many values up to it


class GatewayScrape(msgspec.Struct, frozen=True):
    """The histogram of the gaps between outputs, as one look at /metrics shows it; seconds."""

    buckets: Buckets
    sum: float

    def since(self, before: GatewayScrape) -> GatewayScrape:
        """What came after another look."""
        pairs = zip(self.buckets, before.buckets, strict=True)
        return GatewayScrape([(bound, now - then) for (bound, now), (_, then) in pairs], self.sum - before.sum)

    @property
    def mean(self) -> float:
        return self.sum / self.buckets[-1][1] if self.buckets[-1][1] else 0.0

    def percentile(self, q: float) -> float:
        return quantile(self.buckets, q / 100) or 0.0


def scrape(base_url: str) -> GatewayScrape:
    """Raises OSError where nothing answers, ValueError where the histogram is not there."""
    with urlopen(f"{base_url}/metrics", timeout=10) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    if FAMILY not in families:
        raise ValueError(f"{base_url}/metrics has no {FAMILY}")
    samples = families[FAMILY].samples
    buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name.endswith("_bucket")]
    return GatewayScrape(buckets, next(s.value for s in samples if s.name.endswith("_sum")))


def bucketed(gaps: Iterable[float]) -> GatewayScrape:
    """A client's gaps as the services would have counted them: percentiles of both are then cut alike."""
    histogram = Histogram(ITL)
    for gap in gaps:
        histogram.observe(gap)
    return GatewayScrape([(float(bound), float(count)) for bound, count in histogram.cumulative()], histogram.sum)


class GatewayAccount(msgspec.Struct, frozen=True):
    """One run by the services' own clocks; seconds."""

    ttft: Summary
    e2el: Summary
    itl: GatewayScrape


class Accounts:
    """Reads what was added since it was last asked."""

    def __init__(self, gateway_log: Path, base_url: str) -> None:
        self._log: BinaryIO = gateway_log.open("rb")
        self._base_url = base_url
        self._seen = scrape(base_url)
        self.take()

    def take(self) -> GatewayAccount:
        """Of the requests that have ended well since the last call."""
        ended = _finished(self._log.readlines())
        seen, self._seen = self._seen, scrape(self._base_url)
        return GatewayAccount(
            ttft=summarise((line["ttft_ms"] / 1000 for line in ended), QS),
            e2el=summarise((line["e2e_ms"] / 1000 for line in ended), QS),
            itl=self._seen.since(seen),
        )

    def close(self) -> None:
        self._log.close()


def _finished(lines: Sequence[bytes]) -> list[dict[str, float]]:
    """The log's lines of requests that ended well.  What is no JSON is another program's."""
    events = (json.loads(line) for line in lines if line.startswith(b"{"))
    return [event for event in events if event.get("event") == "request_finished"]


class RatesBench:
    """One deployment, its load and its accounts."""

    def __init__(self, running: LocalDeployment, seconds: float) -> None:
        settings = running.settings
        self.running = running
        self.base_url = f"http://127.0.0.1:{settings.gateway.http_port}"
        self.accounts = Accounts(running.log_of("gateway"), self.base_url)
        self.capacity = 0.0  # requests per second
        self._seconds = seconds
        self._seed = 0

    def count(self, per_second: float) -> int:
        return max(MIN_REQUESTS, round(per_second * self._seconds))

    def requests(self, count: int, per_second: float, vocab_size: int) -> list[LoadRequest]:
        """New ones at every call."""
        self._seed += 1
        rng = Random(self._seed)
        made = random_requests(count, LENGTHS, vocab_size, rng)
        return at_times(made, arrival_times(count, per_second, 1.0, rng))

    async def measure(self, backend: ServerBackend, per_second: float, count: int) -> tuple[Report, GatewayAccount]:
        """Raises RuntimeError where a request failed."""
        self.running.check()
        self.accounts.take()
        outcomes = await Generator(backend).send(self.requests(count, per_second, backend.vocab_size), lambda _: None)
        if failed := [outcome.error or "no output" for outcome in outcomes if not outcome.succeeded]:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        await asyncio.sleep(SETTLED)
        options = RunOptions(backend=backend.name, model="", request_rate=per_second, burstiness=1.0, max_concurrency=0)
        return report_of(options, outcomes, Acceptance()), self.accounts.take()

    async def rates(self) -> tuple[list[Report], list[Result]]:
        backend = GrpcBackend(self.running.address, SAMPLING)
        try:
            await backend.model(60.0)
            await self.measure(backend, math.inf, MIN_REQUESTS)  # warm-up
            at_once, _ = await self.measure(backend, math.inf, NUM_AT_ONCE)
            self.capacity = NUM_AT_ONCE / at_once.duration
            reports, lines = [], [Result("capacity", self.capacity, "requests/s")]
            for share in SHARES:
                rate = share * self.capacity
                report, account = await self.measure(backend, rate, self.count(rate))
                reports.append(report)
                lines += beside(f"{rate:.2f}/s", report.outcomes, account)
            return reports, lines
        finally:
            await backend.close()


def beside(name: str, outcomes: Sequence[RequestOutcome], account: GatewayAccount) -> list[Result]:
    """Our own generator's figures and the services'."""
    ttft = summarise((outcome.timeline.times[0] - outcome.sent for outcome in outcomes), QS)
    gaps = bucketed(gap for outcome in outcomes for gap in outcome.timeline.itl)
    num_late, worst = lateness(outcomes)
    late = f"; {num_late} sent late, the worst by {1000 * worst:.0f} ms" if num_late else ""
    return compared(name, ttft, gaps, account, late)


def compared(name: str, ttft: Summary, gaps: GatewayScrape, account: GatewayAccount, remark: str) -> list[Result]:
    """A client's figures and the services' of the same requests; the error is that between the two."""
    pairs = [(f"TTFT p{q:g}", ttft.percentiles[q], account.ttft.percentiles[q]) for q in QS]
    pairs += [("ITL mean", gaps.mean, account.itl.mean)]
    pairs += [(f"ITL p{q:g}", gaps.percentile(q), account.itl.percentile(q)) for q in QS]
    counts = "" if ttft.count == account.ttft.count else f"; {ttft.count} and {account.ttft.count} requests"
    return [
        Result(f"{name}: {what}, difference", 100 * abs(client / services - 1) if services else None, "%",
             at_most=MAX_ERROR,
             note=f"client {1000 * client:.2f} ms, services {1000 * services:.2f} ms{counts}{remark}")
        for what, client, services in pairs
    ]  # fmt: skip


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=15, help="of arrivals at each rate")
    parser.add_argument("--model", default="models/pageant-stories")
    parser.add_argument("--plot", type=Path, help="latency over rate, throughput and latency, and every run: a PNG")
    args = parser.parse_args()
    with awake(), with_worker(["-m", "services.worker"], model=args.model, http_port=0) as running:
        bench = RatesBench(running, args.seconds)
        reports, lines = uvloop.run(bench.rates())
        bench.accounts.close()
    print(rates_table(reports))
    if args.plot is not None:
        from services.cli.plots import plot_measured

        plot_measured(reports, args.plot)
    return finish(lines, check=args.check, title="the load generator's figures and the services' of the same requests")
