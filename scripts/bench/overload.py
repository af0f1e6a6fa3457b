"""What a deployment is worth when more is asked of it than it can do, and what one tenant costs another.

    scripts/bench_overload [--check] [--seconds 20] [--step-ms 25] [--rows 32] [--tokens 32] [--deadline 4]

All services are real processes; the worker is a stand-in with a fixed time per step, so that capacity is a number:
rows over step time.  Requests arrive at random times (Poisson), whatever becomes of those before, each with a deadline
as its gRPC timeout.  Goodput counts the tokens of requests that came to their end in time; what was refused is not
tried again.

First the capacity, by as many clients as there are rows, one request after the other; then 1 and 3 times as many
arrivals; then a tenant alone at a tenth of the capacity, and the same beside one that sends ten times as much.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop

from protos.pageant.v1 import inference_pb2_grpc
from scripts.bench.clients import OPTIONS, ask
from scripts.bench.report import Line, add_check, finish
from scripts.bench.troupe import troupe

MIN_GOODPUT = 90.0  # percent of that at capacity
MAX_REFUSAL_MS = 10.0
MAX_UNFAIRNESS = 1.5  # times the p99 of a tenant alone
WARM_SECONDS = 4.0
NUM_CHANNELS = 8


@dataclass
class Tally:
    """What became of the requests of one phase, those of its first seconds left out."""

    first_ms: list[float] = field(default_factory=list)
    refusal_ms: list[float] = field(default_factory=list)
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
        self, tally: Tally, *, tenant: str = "", deadline: float | None = None, counts: bool = True
    ) -> None:
        """One request to its end, of whatever kind."""
        self._num_asked += 1
        request = ask(self._num_asked, self._num_tokens)
        stub = self._stubs[self._num_asked % NUM_CHANNELS]
        start, first, tokens, ending = time.perf_counter(), 0.0, 0, "OK"
        try:
            call = stub.Generate(request, timeout=deadline or self._deadline, metadata=(("x-tenant", tenant),))
            async for response in call:
                first = first or time.perf_counter()
                tokens += len(response.token_ids)
        except grpc.aio.AioRpcError as error:
            ending = error.code().name
        if not counts:
            return
        tally.endings[ending] += 1
        if first:
            tally.first_ms.append(1000 * (first - start))
        if ending == "RESOURCE_EXHAUSTED":
            tally.refusal_ms.append(1000 * (time.perf_counter() - start))
        if ending == "OK":
            tally.tokens += tokens
        else:
            tally.wasted += tokens

    async def capacity(self, rows: int, seconds: float) -> float:
        """Requests per second of as many clients as there are rows."""
        tally, end = Tally(), time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self.request(tally, deadline=60.0)

        start = time.monotonic()
        await asyncio.gather(*(client() for _ in range(rows)))
        return tally.endings["OK"] / (time.monotonic() - start)

    async def arrivals(self, rate: float, seconds: float, *, seed: int, tenant: str = "") -> Tally:
        """Requests at random times, `rate` a second; returns when all have ended."""
        rng, tally, tasks = random.Random(seed), Tally(), set[asyncio.Task[None]]()
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
        return tally


async def measure(address: str, args: argparse.Namespace) -> list[Line]:
    crowd = Crowd(address, args.tokens, args.deadline)
    try:
        rate = await crowd.capacity(args.rows, args.seconds / 2)
        lines = [Line("capacity", rate, "requests/s", note=f"{rate * args.tokens:.0f} tokens/s")]
        at_capacity = await crowd.arrivals(rate, args.seconds, seed=1)
        beyond = await crowd.arrivals(3 * rate, args.seconds, seed=2)
        lines += overload_lines(at_capacity, beyond, args.seconds)
        solo = await crowd.arrivals(rate / 10, 2 * args.seconds, seed=3, tenant="modest")
        beside, _ = await asyncio.gather(
            crowd.arrivals(rate / 10, 2 * args.seconds, seed=3, tenant="modest"),
            crowd.arrivals(rate, 2 * args.seconds, seed=4, tenant="greedy"),
        )
        return lines + fairness_lines(solo, beside)
    finally:
        await crowd.close()


def overload_lines(at_capacity: Tally, beyond: Tally, seconds: float) -> list[Line]:
    lines = []
    for name, tally in (("1 x", at_capacity), ("3 x", beyond)):
        endings = ", ".join(f"{count} {ending}" for ending, count in tally.endings.most_common())
        note = f"{endings}; {tally.wasted} tokens in vain"
        lines.append(Line(f"{name} capacity: goodput", tally.tokens / seconds, "tokens/s", note=note))
        lines.append(Line(f"{name} capacity: first token, p99", percentile(tally.first_ms, 0.99), "ms"))
    kept = 100 * beyond.tokens / at_capacity.tokens if at_capacity.tokens else None
    lines.append(Line("goodput at 3 x of that at 1 x", kept, "%", at_least=MIN_GOODPUT))
    refusals = percentile(beyond.refusal_ms, 0.5), percentile(beyond.refusal_ms, 0.99)
    lines.append(
        Line("refusal at 3 x, median", refusals[0], "ms", at_most=MAX_REFUSAL_MS, note=f"of {len(beyond.refusal_ms)}")
    )
    lines.append(Line("refusal at 3 x, p99", refusals[1], "ms", note="clients share the machine's cores"))
    return lines


def fairness_lines(solo: Tally, beside: Tally) -> list[Line]:
    alone, crowded = percentile(solo.first_ms, 0.99), percentile(beside.first_ms, 0.99)
    ratio = crowded / alone if alone and crowded else None
    served = 100 * beside.endings["OK"] / max(1, beside.num_requests)
    return [
        Line("a tenant alone: first token, p99", alone, "ms", note=f"{solo.num_requests} requests"),
        Line("beside one ten times as busy", crowded, "ms", note=f"{served:.0f} % of its requests served"),
        Line("of its p99 alone", ratio, "x", at_most=MAX_UNFAIRNESS),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--seconds", type=float, default=20, help="of each phase")
    parser.add_argument("--step-ms", type=float, default=25)
    parser.add_argument("--rows", type=int, default=32, help="sequences that run at a time")
    parser.add_argument("--tokens", type=int, default=32, help="of each request")
    parser.add_argument("--deadline", type=float, default=4, help="seconds, of each request")
    args = parser.parse_args()
    with troupe(args.step_ms, max_num_seqs=args.rows, log_level="warning", http_port=-1) as running:
        lines = uvloop.run(measure(running.address, args))
        running.check()
    title = f"steps of {args.step_ms:g} ms, {args.rows} rows, {args.tokens} tokens each, within {args.deadline:g} s"
    return finish(lines, check=args.check, title=title)


if __name__ == "__main__":
    sys.exit(main())
