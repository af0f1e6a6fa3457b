"""What endless requests in the background cost interactive streams.

    scripts/bench_background [--check] [--model DIR] [--rounds 6] [--seconds 8] [--bursts 1.5] [--streams 4]
                             [--tokens 48] [--batch 16] [--step-ms 0]

All services are real processes with a real model, or with a stand-in whose steps take so many milliseconds.  Bursts of
interactive streams come at random times (Poisson), and wait for nothing.  In turns, round by round, they have the
deployment to themselves, and share it with so many endless requests in the background: the same bursts, the same
prompts.  The figures are over all rounds: between two messages of a stream, and from a stream's due time to its first
message.  A stream that comes has to wait for the step that is under way; what that may cost is what
`background_step_tokens` bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random

import uvloop

from scripts.bench.common.clients import ClientConnections, ask
from scripts.bench.common.deployment import LocalDeployment, with_stand_in, with_worker
from scripts.bench.common.quiet_gateway import BATCH_TENANT
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.common.tokens import MODEL
from scripts.bench.common.turns import rotated
from services.cli.bench.generator import Generator, RequestOutcome
from shared.metrics import percentile
from shared.workload import LoadRequest, TextPrompt, arrival_times

MAX_RATIO = 1.05  # of the p99 between tokens
WARM_STREAMS = 24
BATCH_TOKENS = 400  # of each request in the background
INTERACTIVE, BENEATH = "alone", "with a batch beneath"


@dataclass
class TimesBeneath:
    """Milliseconds, and the tokens that the background had meanwhile."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    batch_tokens: int = 0

    def add(self, outcome: RequestOutcome) -> None:
        if not outcome.succeeded:
            raise RuntimeError(f"an interactive stream failed: {outcome.error}")
        times = outcome.timeline.times
        self.gaps += [1000 * (after - before) for before, after in pairwise(times)]
        self.firsts.append(1000 * (times[0] - outcome.timeline.start))


class BatchAndStreams(ClientConnections):
    """Interactive streams and batches, as clients of one gateway."""

    def __init__(self, address: str, num_tokens: int) -> None:
        super().__init__(address, 2)
        self._stub, self._batch_stub = self.stubs
        self._num_tokens = num_tokens
        self._num_asked = 0
        self.batch_tokens = 0

    async def stream(self, request: LoadRequest, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
        """One interactive stream."""
        self._num_asked += 1
        async for response in self._stub.Generate(ask(self._num_asked, self._num_tokens)):
            outcome.timeline.add(clock(), len(response.token_ids))

    async def play(self, bursts: list[float], num_streams: int) -> list[RequestOutcome]:
        times = [at for at in bursts for _ in range(num_streams)]
        requests = [LoadRequest(TextPrompt(""), 0, self._num_tokens, at) for at in times]
        return await Generator(self).send(requests, lambda _: None)

    @contextlib.asynccontextmanager
    async def batch(self, size: int) -> AsyncIterator[None]:
        """So many requests in the background, one after the other, until the block ends."""
        tasks = [asyncio.create_task(self._endless(place)) for place in range(size)]
        try:
            await asyncio.sleep(1.0 if size else 0.0)  # it is well under way
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            failed = [one for one in ended if not isinstance(one, asyncio.CancelledError)]
            if failed:
                raise RuntimeError(f"a request in the background failed: {failed[0]}")

    async def _endless(self, place: int) -> None:
        while True:
            place += 1000
            message = ask(place, BATCH_TOKENS)
            async for response in self._batch_stub.Generate(message, metadata=(("x-tenant", BATCH_TENANT),)):
                self.batch_tokens += len(response.token_ids)


async def measure(running: LocalDeployment, args: argparse.Namespace) -> dict[str, TimesBeneath]:
    figures = {INTERACTIVE: TimesBeneath(), BENEATH: TimesBeneath()}
    async with BatchAndStreams(running.address, args.tokens) as visitors:
        await visitors.play([0.05 * index for index in range(WARM_STREAMS)], 1)
        for number in range(args.rounds):
            bursts = arrival_times(round(args.bursts * args.seconds), args.bursts, 1.0, Random(number))
            for name in rotated([INTERACTIVE, BENEATH], number):
                before = visitors.batch_tokens
                async with visitors.batch(args.batch if name == BENEATH else 0):
                    outcomes = await visitors.play(bursts, args.streams)
                for outcome in outcomes:
                    figures[name].add(outcome)
                figures[name].batch_tokens += visitors.batch_tokens - before
    return figures


def lines_of(figures: dict[str, TimesBeneath], seconds: float) -> list[Result]:
    lines = []
    for what, part in (("between tokens", "gaps"), ("to the first token", "firsts")):
        for q in (50, 99):
            alone, beneath = (percentile(getattr(figures[name], part), q) for name in (INTERACTIVE, BENEATH))
            is_bound = part == "gaps" and q == 99
            note = f"{len(getattr(figures[BENEATH], part))} of them"
            lines += [
                Result(f"{what}, p{q}, alone", alone, "ms"),
                Result(f"{what}, p{q}, with a batch beneath", beneath, "ms", note=note),
                Result("of that alone", beneath / alone, "x", at_most=MAX_RATIO if is_bound else None),
            ]
    done = figures[BENEATH].batch_tokens
    return [*lines, Result("the batch meanwhile", done / seconds, "tokens/s", at_least=1.0)]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default=str(MODEL), help="of the worker")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8, help="of each half of a round")
    parser.add_argument("--bursts", type=float, default=1.5, help="a second")
    parser.add_argument("--streams", type=int, default=4, help="of a burst")
    parser.add_argument("--tokens", type=int, default=48, help="of a stream")
    parser.add_argument("--batch", type=int, default=16, help="requests in the background")
    parser.add_argument("--step-ms", type=float, default=0, help="of a stand-in for the worker; 0: the model")
    parser.add_argument("--step-tokens", type=int, default=0, help="background_step_tokens; 0: the default")
    args = parser.parse_args()
    modules = {"gateway": ["scripts.bench.common.quiet_gateway"]}
    more = {"background_step_tokens": args.step_tokens} if args.step_tokens else {}
    deployed = partial(with_stand_in, args.step_ms) if args.step_ms else with_worker
    with deployed(modules=modules, model=args.model, **more) as running:
        figures = uvloop.run(measure(running, args))
        running.check()
    title = f"bursts of {args.streams} streams, {args.bursts:g} a second, and {args.batch} requests in the background"
    return finish(lines_of(figures, args.rounds * args.seconds), check=args.check, title=title)
