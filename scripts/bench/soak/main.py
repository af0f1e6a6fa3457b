"""A long load of many tenants, and whether any service grows: scripts/soak [--minutes 30] [--tenants 10000] [--check]

All services are real processes with the bundled model, and a draft that looks up in the text.  Requests come at random
times, `--rate` a second, of tenants in turn, each with a request id of its own: streams, siblings, beams, formats,
chats, embeddings, over gRPC and HTTP, and every third ends otherwise than by its last token: cancelled, hung up on,
late, refused, malformed, put aside for a client that comes back or does not.

The resident memory of each service is looked at every few seconds; that of the tokenizer's children is a line of its
own.  The table says by how much each grew from the end of the first third to the end.  With `--check` the status is 1
where one grew by more than `--bound` percent.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import uvloop

from scripts.bench.common.deployment import LocalDeployment, with_worker
from scripts.bench.common.proc import tree, usage
from scripts.bench.common.report import bench_parser, finish
from scripts.bench.soak.growth import Curve, lines
from scripts.bench.soak.visits import Doors, SoakVisit, make
from services.cli.addresses import free_port

MAX_OPEN = 96  # visits at a time: where the services come late, visits are left out
DRAIN_SECONDS = 90.0  # for the last visits
CHILDREN = "tokenizer's children"


@dataclass(frozen=True)
class SoakOrder:
    seconds: float
    tenants: int
    rate: float  # visits a second
    sample: float  # seconds between two looks at memory
    seed: int


@dataclass
class Came:
    """What came of it."""

    curves: dict[str, Curve]
    endings: Counter[str]
    num_left_out: int = 0  # visits, since too many were under way
    seconds: float = 0.0


async def soak(running: LocalDeployment, order: SoakOrder) -> Came:
    came = Came({}, Counter())
    began = time.monotonic()
    watching = asyncio.create_task(_watch(running, came, order.sample))
    try:
        async with Doors(running.address, running.settings.gateway.http_port) as doors:
            await _visits(doors, order, came)
    finally:
        came.seconds = time.monotonic() - began
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    running.check()
    return came


async def _visits(doors: Doors, order: SoakOrder, came: Came) -> None:
    rng, begin, due, open_visits = Random(order.seed), time.monotonic(), 0.0, set[asyncio.Task[None]]()

    async def visit(number: int) -> None:
        seed = rng.getrandbits(32)
        came.endings[await make(SoakVisit(doors, number, f"tenant-{number % order.tenants}", Random(seed)))] += 1

    number = 0
    while due < order.seconds:
        due += rng.expovariate(order.rate)
        await asyncio.sleep(max(0.0, begin + due - time.monotonic()))
        if len(open_visits) >= MAX_OPEN:
            came.num_left_out += 1
            continue
        task = asyncio.create_task(visit(number))
        open_visits.add(task)
        task.add_done_callback(open_visits.discard)
        number += 1
    async with asyncio.timeout(DRAIN_SECONDS):
        await asyncio.gather(*open_visits)


async def _watch(running: LocalDeployment, came: Came, sample: float) -> None:
    begin = time.monotonic()
    while True:
        seconds = time.monotonic() - begin
        for name, used in running.usages().items():
            came.curves.setdefault(name, Curve()).add(seconds, used.resident)
        came.curves.setdefault(CHILDREN, Curve()).add(seconds, _children(running.processes["tokenizer"].pid))
        await asyncio.sleep(sample)


def _children(pid: int) -> int:
    """Resident bytes of a process's children; one that ends meanwhile does not count."""
    total = 0
    for child in tree(pid)[1:]:
        with suppress(OSError):
            total += usage(child).resident
    return total


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--tenants", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=25.0, help="requests a second")
    parser.add_argument("--blocks", type=int, default=2048, help="KV blocks; few, so that the cache is full early")
    parser.add_argument("--sample", type=float, default=5.0, help="seconds between two looks at memory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bound", type=float, default=5.0, help="percent that a service may grow after a third")
    args = parser.parse_args()
    order = SoakOrder(60 * args.minutes, args.tenants, args.rate, args.sample, args.seed)
    settings = {
        "num_blocks": args.blocks, "num_threads": 1, "draft": "ngram", "http_port": free_port(),
        "log_level": "warning",
    }  # fmt: skip
    modules = {"draft": ["services.draft"]}
    with with_worker(modules=modules, **settings) as running:
        came = uvloop.run(soak(running, order))
    print("\n".join(f"{count:8,}  {ending}" for ending, count in sorted(came.endings.items())))
    num_visits = came.endings.total()
    title = (
        f"\n{num_visits:,} requests of {min(num_visits, order.tenants):,} tenants in {came.seconds / 60:.1f} minutes, "
        f"{num_visits / came.seconds:.1f} a second; {came.num_left_out:,} left out\n"
        "growth of resident memory after the first third"
    )
    return finish(lines(came.curves.items(), args.bound), check=args.check, title=title)
