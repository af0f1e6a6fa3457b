"""What a deployment is worth when more is asked of it than it can do, and what one tenant costs another.

    scripts/bench_overload [--check] [--seconds 20] [--step-ms 25] [--rows 32] [--tokens 32] [--deadline 4]

All services are real processes; the worker is a stand-in with a fixed time per step, so that capacity is a number:
rows over step time.  Requests arrive at random times (Poisson), whatever becomes of those before, each with a deadline
as its gRPC timeout.  Goodput counts the tokens of requests that came to their end in time; what was refused is not
tried again.

First the capacity, by as many clients as there are rows, one request after the other; then 1 and 3 times as many
arrivals; then a tenant alone at a tenth of the capacity, and the same requests beside a tenant that sends ten times as
many.  The two together want more than there is, the first no more than its share.

How long a refusal takes is told in three parts: until the call reaches its method, there (both by the gateway's log,
whose clock is the client's), and as the client sees it.  All share the machine: how late the load generator was, and
for how long the gateway waited for a core, stand beside it.
What the scheduler alone makes of the same arrivals, `tests/unit/simulator/test_tenants.py` says in virtual time.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import grpc
import uvloop

from scripts.bench.common.clients import ClientConnections, ask
from scripts.bench.common.deployment import LocalDeployment, log_lines, with_stand_in
from scripts.bench.common.report import Result, bench_parser, finish
from services.cli.bench.generator import Generator, RequestOutcome
from shared.metrics import percentile
from shared.workload import LoadRequest, TextPrompt, arrival_times

MIN_GOODPUT = 90.0  # percent of that at capacity
MAX_REFUSAL_MS = 10.0
MAX_UNFAIRNESS = 1.5  # times the p99 of a tenant alone
WARM_SECONDS = 4.0
NUM_CHANNELS = 8
REFUSED = "RESOURCE_EXHAUSTED"


@dataclass
class Call:
    """What became of one request."""

    outcome: RequestOutcome
    label: str
    sent_at: float  # Unix seconds
    ending: str = "OK"
    has_time: bool = False  # whether a refusal said when to come back

    @property
    def counts(self) -> bool:
        return self.outcome.timeline.start > WARM_SECONDS


@dataclass
class LoadPhase:
    """The requests of one phase, those of its first seconds left out."""

    calls: list[Call] = field(default_factory=list)
    core_wait: float = 0.0  # seconds that the gateway waited for a core

    def first_ms(self, q: float) -> float | None:
        """Of the time to the first token, from when a request was sent."""
        times = [call.outcome.timeline.times for call in self.calls]
        sent = [call.outcome.sent for call in self.calls]
        return percentile_of([1000 * (t[0] - s) for t, s in zip(times, sent, strict=True) if t], q)

    @property
    def refused(self) -> list[Call]:
        return [call for call in self.calls if call.ending == REFUSED]

    @property
    def endings(self) -> Counter[str]:
        return Counter(call.ending for call in self.calls)

    def tokens(self, *, in_time: bool) -> int:
        """Of requests that came to their end in time, or of the others."""
        return sum(call.outcome.num_output_tokens for call in self.calls if (call.ending == "OK") == in_time)

    @property
    def served(self) -> str:
        return f"{100 * self.endings['OK'] / max(1, len(self.calls)):.0f} % of its requests served"


def percentile_of(values: Sequence[float], q: float) -> float | None:
    """None of nothing."""
    return percentile(values, q) if values else None


class Crowd(ClientConnections):
    """Clients in this process: what the load generator sends through."""

    def __init__(self, address: str, num_tokens: int, deadline: float) -> None:
        super().__init__(address, NUM_CHANNELS)
        self._num_tokens = num_tokens
        self._deadline = deadline
        self._calls: list[Call] = []

    async def stream(self, request: LoadRequest, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        """One request to its end, of whatever kind."""
        number = len(self._calls)
        message = ask(number, self._num_tokens)
        message.label = f"{number}"
        call = Call(outcome, message.label, time.time())
        self._calls.append(call)
        metadata = (("x-tenant", request.tenant),)
        try:
            stub = self.stubs[number % NUM_CHANNELS]
            async for response in stub.Generate(message, timeout=self._deadline, metadata=metadata):
                outcome.timeline.add(clock(), len(response.token_ids))
        except grpc.aio.AioRpcError as error:
            call.ending = error.code().name
            trailing: Any = error.trailing_metadata()
            call.has_time = "retry-after-ms" in dict(trailing or ())

    async def capacity(self, rows: int, count: int) -> float:
        """Requests per second of as many clients as there are rows, one request after the other."""
        requests = [LoadRequest(TextPrompt(""), 0, self._num_tokens)] * count
        outcomes = await Generator(self, rows).send(requests, lambda _: None)
        return count / max(outcome.end for outcome in outcomes)

    async def arrivals(self, rate: float, seconds: float, *, seed: int, tenant: str = "") -> LoadPhase:
        """Requests at random times, `rate` a second; returns when all have ended."""
        times = arrival_times(round(rate * (WARM_SECONDS + seconds)), rate, 1.0, Random(seed))
        requests = [LoadRequest(TextPrompt(""), 0, self._num_tokens, at, tenant) for at in times]
        mine = {id(outcome) for outcome in await Generator(self).send(requests, lambda _: None)}
        return LoadPhase([call for call in self._calls if call.counts and id(call.outcome) in mine])


@dataclass
class Refusals:
    """What the gateway's log tells of them, in milliseconds."""

    before: list[float] = field(default_factory=list)  # from the client's sending to the method
    within: list[float] = field(default_factory=list)


def logged_refusals(log: Path, sent_at: Mapping[str, float]) -> Refusals:
    """Of the calls with these labels."""
    found, received = Refusals(), dict[str, tuple[float, float]]()
    for line in log_lines(log):
        sent = sent_at.get(line.get("label", ""))
        if sent is not None:
            received[line["request_id"]] = sent, datetime.fromisoformat(line["timestamp"]).timestamp()
        if line.get("status") == "RESOURCE_EXHAUSTED" and line["request_id"] in received:
            sent, noted = received[line["request_id"]]
            found.within.append(line["e2e_ms"])
            found.before.append(1000 * (noted - sent) - line["e2e_ms"])
    return found


def core_wait(pid: int) -> float:
    """Seconds that a process's threads were ready to run and had no core."""
    texts = (path.read_text(encoding="ascii") for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(text.split()[1]) for text in texts) / 1e9


async def measure(running: LocalDeployment, args: argparse.Namespace) -> list[Result]:
    gateway = running.processes["gateway"].pid
    async with Crowd(running.address, args.tokens, args.deadline) as crowd:
        nominal = args.rows / (args.tokens * args.step_ms / 1000)
        rate = await crowd.capacity(args.rows, max(args.rows, round(nominal * args.seconds / 2)))
        lines = [Result("capacity", rate, "requests/s", note=f"{rate * args.tokens:.0f} tokens/s")]
        at_capacity = await crowd.arrivals(rate, args.seconds, seed=1)
        waited = core_wait(gateway)
        beyond = await crowd.arrivals(3 * rate, args.seconds, seed=2)
        beyond.core_wait = core_wait(gateway) - waited
        lines += overload_lines(at_capacity, beyond, args.seconds)
        sent_at = {call.label: call.sent_at for call in beyond.refused}
        lines += refusal_lines(beyond, logged_refusals(running.log_of("gateway"), sent_at))
        solo = await crowd.arrivals(rate / 10, 2 * args.seconds, seed=3, tenant="modest")
        beside, greedy = await asyncio.gather(
            crowd.arrivals(rate / 10, 2 * args.seconds, seed=3, tenant="modest"),
            crowd.arrivals(rate, 2 * args.seconds, seed=4, tenant="greedy"),
        )
        return lines + fairness_lines(solo, beside, greedy)


def overload_lines(at_capacity: LoadPhase, beyond: LoadPhase, seconds: float) -> list[Result]:
    lines, tokens = [], at_capacity.tokens(in_time=True)
    for name, phase in (("1 x", at_capacity), ("3 x", beyond)):
        endings = ", ".join(f"{count} {ending}" for ending, count in phase.endings.most_common())
        note = f"{endings}; {phase.tokens(in_time=False)} tokens in vain"
        goodput = phase.tokens(in_time=True) / seconds
        lines.append(Result(f"{name} capacity: goodput", goodput, "tokens/s", note=note))
        lines.append(Result(f"{name} capacity: first token, p99", phase.first_ms(99), "ms"))
    kept = 100 * beyond.tokens(in_time=True) / tokens if tokens else None
    return [*lines, Result("goodput at 3 x of that at 1 x", kept, "%", at_least=MIN_GOODPUT)]


def refusal_lines(beyond: LoadPhase, logged: Refusals) -> list[Result]:
    late = 1000 * (percentile_of([call.outcome.late for call in beyond.calls], 99) or 0.0)
    seen = [1000 * (call.outcome.end - call.outcome.sent) for call in beyond.refused]
    parts = {
        "until the method": (logged.before, None, f"the gateway waited {beyond.core_wait:.1f} s for a core"),
        "in the method": (logged.within, MAX_REFUSAL_MS, ""),
        "as seen by the client": (seen, MAX_REFUSAL_MS, f"the load generator was {late:.0f} ms late at p99"),
    }
    lines = []
    for part, (values, bound, note) in parts.items():
        lines.append(Result(f"refusal {part}, median", percentile_of(values, 50), "ms", note=f"of {len(values)}"))
        lines.append(Result(f"refusal {part}, p99", percentile_of(values, 99), "ms", at_most=bound, note=note))
    num_without = sum(not call.has_time for call in beyond.refused)
    return [*lines, Result("refusals without a time to come back", num_without, at_most=0)]


def fairness_lines(solo: LoadPhase, beside: LoadPhase, greedy: LoadPhase) -> list[Result]:
    lines = []
    for name, q, bound in (("median", 50, None), ("p99", 99, MAX_UNFAIRNESS)):
        alone, crowded = solo.first_ms(q), beside.first_ms(q)
        ratio = crowded / alone if alone and crowded else None
        lines += [
            Result(f"a tenant alone: first token, {name}", alone, "ms", note=f"{len(solo.calls)} requests"),
            Result(f"beside one ten times as busy, {name}", crowded, "ms", note=beside.served),
            Result(f"of its {name} alone", ratio, "x", at_most=bound),
        ]
    return [*lines, Result("the busy one: first token, p99", greedy.first_ms(99), "ms", note=greedy.served)]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="of each phase")
    parser.add_argument("--step-ms", type=float, default=25)
    parser.add_argument("--rows", type=int, default=32, help="sequences that run at a time")
    parser.add_argument("--tokens", type=int, default=32, help="of each request")
    parser.add_argument("--deadline", type=float, default=4, help="seconds, of each request")
    args = parser.parse_args()
    with with_stand_in(args.step_ms, max_num_seqs=args.rows, http_port=-1) as running:
        lines = uvloop.run(measure(running, args))
        running.check()
    title = f"steps of {args.step_ms:g} ms, {args.rows} rows, {args.tokens} tokens each, within {args.deadline:g} s"
    return finish(lines, check=args.check, title=title)
