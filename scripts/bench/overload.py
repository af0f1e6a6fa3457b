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
whose clock is the client's), and as the client sees it.  All share the machine: how late the client's own event loop
would have come to something, and for how long the gateway waited for a core, stand beside it.
What the scheduler alone makes of the same arrivals, `tests/unit/simulator/test_tenants.py` says in virtual time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import uvloop

from protos.pageant.v1 import inference_pb2_grpc
from scripts.bench.clients import OPTIONS, ask
from scripts.bench.report import Result, add_check, finish
from scripts.bench.troupe import LocalDeployment, troupe

MIN_GOODPUT = 90.0  # percent of that at capacity
MAX_REFUSAL_MS = 10.0
MAX_UNFAIRNESS = 1.5  # times the p99 of a tenant alone
WARM_SECONDS = 4.0
NUM_CHANNELS = 8
TICK = 0.005  # seconds between two looks at how late the client's event loop is


@dataclass
class EndingTally:
    """What became of the requests of one phase, those of its first seconds left out."""

    first_ms: list[float] = field(default_factory=list)
    refusal_ms: list[float] = field(default_factory=list)
    num_without_time: int = 0  # refusals that did not say when to come back
    sent_at: dict[str, float] = field(default_factory=dict)  # Unix seconds, of what was refused, by label
    behind_ms: list[float] = field(default_factory=list)  # how late the client's event loop was, at regular times
    core_wait: float = 0.0  # seconds that the gateway waited for a core
    endings: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wasted: int = 0  # tokens of requests that did not come to their end in time

    @property
    def num_requests(self) -> int:
        return sum(self.endings.values())


def percentile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class Crowd:
    """Clients of one gateway in this process."""

    def __init__(self, address: str, num_tokens: int, deadline: float) -> None:
        self._channels: list[Any] = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(NUM_CHANNELS)]
        self._stubs: list[Any] = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._num_tokens = num_tokens
        self._deadline = deadline
        self._num_asked = 0

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def request(
        self, tally: EndingTally, *, tenant: str = "", deadline: float | None = None, counts: bool = True
    ) -> None:
        """One request to its end, of whatever kind."""
        self._num_asked += 1
        request = ask(self._num_asked, self._num_tokens)
        request.label, sent_at = f"{self._num_asked}", time.time()
        stub = self._stubs[self._num_asked % NUM_CHANNELS]
        start, first, tokens, ending, has_time = time.perf_counter(), 0.0, 0, "OK", False
        try:
            call = stub.Generate(request, timeout=deadline or self._deadline, metadata=(("x-tenant", tenant),))
            async for response in call:
                first = first or time.perf_counter()
                tokens += len(response.token_ids)
        except grpc.aio.AioRpcError as error:
            ending = error.code().name
            metadata: Any = error.trailing_metadata()
            has_time = "retry-after-ms" in dict(metadata or ())
        if not counts:
            return
        tally.endings[ending] += 1
        if first:
            tally.first_ms.append(1000 * (first - start))
        if ending == "RESOURCE_EXHAUSTED":
            tally.refusal_ms.append(1000 * (time.perf_counter() - start))
            tally.num_without_time += not has_time
            tally.sent_at[request.label] = sent_at
        if ending == "OK":
            tally.tokens += tokens
        else:
            tally.wasted += tokens

    async def capacity(self, rows: int, seconds: float) -> float:
        """Requests per second of as many clients as there are rows."""
        tally, end = EndingTally(), time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self.request(tally, deadline=60.0)

        start = time.monotonic()
        await asyncio.gather(*(client() for _ in range(rows)))
        return tally.endings["OK"] / (time.monotonic() - start)

    async def arrivals(self, rate: float, seconds: float, *, seed: int, tenant: str = "") -> EndingTally:
        """Requests at random times, `rate` a second; returns when all have ended."""
        rng, tally = random.Random(seed), EndingTally()
        async with behind(tally):
            await self._arrive(rate, seconds, rng, tally, tenant)
        return tally

    async def _arrive(self, rate: float, seconds: float, rng: random.Random, tally: EndingTally, tenant: str) -> None:
        tasks = set[asyncio.Task[None]]()
        start = time.monotonic()
        due = start
        while (due := due + rng.expovariate(rate)) < start + WARM_SECONDS + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            counts = due > start + WARM_SECONDS
            task = asyncio.create_task(self.request(tally, tenant=tenant, counts=counts))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.gather(*tasks)


@contextlib.asynccontextmanager
async def behind(tally: EndingTally) -> AsyncIterator[None]:
    """Note how late the event loop comes to what is due, until the block ends."""

    async def look() -> None:
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            late = time.perf_counter() - due
            tally.behind_ms += [1000 * (late - passed * TICK) for passed in range(1 + int(late / TICK))]

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()


@dataclass
class Refusals:
    """What the gateway's log tells of them, in milliseconds."""

    before: list[float] = field(default_factory=list)  # from the client's sending to the method
    within: list[float] = field(default_factory=list)


def logged_refusals(log: Path, sent_at: Mapping[str, float]) -> Refusals:
    """Of the calls with these labels."""
    found, received = Refusals(), dict[str, tuple[float, float]]()
    for text in log.read_text(encoding="utf-8").splitlines():
        line = json.loads(text) if text.startswith("{") else {}
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
    crowd, gateway = Crowd(running.address, args.tokens, args.deadline), running.processes["gateway"].pid
    try:
        rate = await crowd.capacity(args.rows, args.seconds / 2)
        lines = [Result("capacity", rate, "requests/s", note=f"{rate * args.tokens:.0f} tokens/s")]
        at_capacity = await crowd.arrivals(rate, args.seconds, seed=1)
        waited = core_wait(gateway)
        beyond = await crowd.arrivals(3 * rate, args.seconds, seed=2)
        beyond.core_wait = core_wait(gateway) - waited
        lines += overload_lines(at_capacity, beyond, args.seconds)
        lines += refusal_lines(beyond, logged_refusals(running.log_of("gateway"), beyond.sent_at))
        solo = await crowd.arrivals(rate / 10, 2 * args.seconds, seed=3, tenant="modest")
        beside, greedy = await asyncio.gather(
            crowd.arrivals(rate / 10, 2 * args.seconds, seed=3, tenant="modest"),
            crowd.arrivals(rate, 2 * args.seconds, seed=4, tenant="greedy"),
        )
        return lines + fairness_lines(solo, beside, greedy)
    finally:
        await crowd.close()


def overload_lines(at_capacity: EndingTally, beyond: EndingTally, seconds: float) -> list[Result]:
    lines = []
    for name, tally in (("1 x", at_capacity), ("3 x", beyond)):
        endings = ", ".join(f"{count} {ending}" for ending, count in tally.endings.most_common())
        note = f"{endings}; {tally.wasted} tokens in vain"
        lines.append(Result(f"{name} capacity: goodput", tally.tokens / seconds, "tokens/s", note=note))
        lines.append(Result(f"{name} capacity: first token, p99", percentile(tally.first_ms, 0.99), "ms"))
    kept = 100 * beyond.tokens / at_capacity.tokens if at_capacity.tokens else None
    lines.append(Result("goodput at 3 x of that at 1 x", kept, "%", at_least=MIN_GOODPUT))
    return lines


def refusal_lines(beyond: EndingTally, logged: Refusals) -> list[Result]:
    behind = percentile(beyond.behind_ms, 0.99) or 0.0
    parts = {
        "until the method": (logged.before, None, f"the gateway waited {beyond.core_wait:.1f} s for a core"),
        "in the method": (logged.within, MAX_REFUSAL_MS, ""),
        "as seen by the client": (beyond.refusal_ms, MAX_REFUSAL_MS, f"its event loop was {behind:.0f} ms late at p99"),
    }
    lines = []
    for part, (values, bound, note) in parts.items():
        lines.append(Result(f"refusal {part}, median", percentile(values, 0.5), "ms", note=f"of {len(values)}"))
        lines.append(Result(f"refusal {part}, p99", percentile(values, 0.99), "ms", at_most=bound, note=note))
    return [*lines, Result("refusals without a time to come back", beyond.num_without_time, at_most=0)]


def fairness_lines(solo: EndingTally, beside: EndingTally, greedy: EndingTally) -> list[Result]:
    lines = []
    for name, share, bound in (("median", 0.5, None), ("p99", 0.99, MAX_UNFAIRNESS)):
        alone, crowded = percentile(solo.first_ms, share), percentile(beside.first_ms, share)
        ratio = crowded / alone if alone and crowded else None
        lines += [
            Result(f"a tenant alone: first token, {name}", alone, "ms", note=f"{solo.num_requests} requests"),
            Result(f"beside one ten times as busy, {name}", crowded, "ms", note=served(beside)),
            Result(f"of its {name} alone", ratio, "x", at_most=bound),
        ]
    return [
        *lines,
        Result("the busy one: first token, p99", percentile(greedy.first_ms, 0.99), "ms", note=served(greedy)),
    ]


def served(tally: EndingTally) -> str:
    return f"{100 * tally.endings['OK'] / max(1, tally.num_requests):.0f} % of its requests served"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--seconds", type=float, default=20, help="of each phase")
    parser.add_argument("--step-ms", type=float, default=25)
    parser.add_argument("--rows", type=int, default=32, help="sequences that run at a time")
    parser.add_argument("--tokens", type=int, default=32, help="of each request")
    parser.add_argument("--deadline", type=float, default=4, help="seconds, of each request")
    args = parser.parse_args()
    with troupe(args.step_ms, max_num_seqs=args.rows, http_port=-1) as running:
        lines = uvloop.run(measure(running, args))
        running.check()
    title = f"steps of {args.step_ms:g} ms, {args.rows} rows, {args.tokens} tokens each, within {args.deadline:g} s"
    return finish(lines, check=args.check, title=title)


if __name__ == "__main__":
    sys.exit(main())
