"""Tokens per second through tokenizer, scheduler, detokenizer, gateway and gRPC, and what each service takes of it.

    scripts/bench_streams [--check] [--streams 1024] [--seconds 20] [--step-ms 25]

All are real processes with real messages on this machine's cores; only the worker is a stand-in, which takes a fixed
time per step.  Clients in one process more hold the streams open, send one request after the other and check every
token.  A service's figure is its processor time in the measured window (user and system, from /proc) over the tokens
that clients received in it; the tokens per second are theirs too, and the clients and the stand-in share the cores.
First, without load, what each service takes of a core, and what the chain adds to the first token of a lone request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from statistics import median
from time import perf_counter

import msgspec
import uvloop

from scripts.bench.common.clients import ClientConnections, Received, ask, full_load, offered
from scripts.bench.common.core import WORKER, asked, core_of
from scripts.bench.common.deployment import LocalDeployment, with_stand_in
from scripts.bench.common.proc import ProcessUsage, usage
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.common.tokens import Speech
from services.detokenizer.decoder import DecoderFactory
from services.detokenizer.table import StreamTable
from services.scheduler.state.policy import Policy
from shared.messages import StepResult, WorkerCapacity

TARGET_TOKENS, TARGET_FIRST_MS = 20_000.0, 3.0
MAX_IDLE = 10.0  # milliseconds of processor time per second
MAX_GROWTH = 8.0  # MiB of resident memory, from the middle of the load to its end; 40 bytes a token would be more
WARM_SECONDS = 5.0
CLIENTS = "clients"
NUM_LONE, LONE_TOKENS = 200, 4  # lone requests, and tokens of each
PAUSE = 0.01  # seconds between requests of a client that takes its time: caches are cold and processors asleep


# -- without load


def idle(running: LocalDeployment, seconds: float) -> list[Result]:
    """Milliseconds of processor time per second of each service that has nothing to do."""
    time.sleep(1)
    before, start = running.usages(), time.monotonic()
    time.sleep(seconds)
    after, elapsed = running.usages(), time.monotonic() - start
    spent = {name: 1000 * (after[name].seconds - before[name].seconds) / elapsed for name in before}
    return [Result(f"idle: {name}", ms, "ms/s", at_most=MAX_IDLE) for name, ms in spent.items()]


def added_to_first_token(address: str) -> list[Result]:
    """Milliseconds: the first token through processes whose worker takes no time, less the same work in this one.

    At concurrency 1, each request after the other's end; and for information the same after a pause.
    """
    alone = 1000 * median(in_process(Speech()))
    lines = []
    pauses = {"at concurrency 1": (0.0, TARGET_FIRST_MS), f"after {1000 * PAUSE:.0f} ms of rest": (PAUSE, None)}
    for what, (pause, bound) in pauses.items():
        chain = 1000 * median(uvloop.run(through_the_chain(address, pause)))
        note = f"{chain:.2f} ms less {alone:.2f} ms in one process"
        lines.append(Result(f"added to the first token {what}", chain - alone, "ms", at_most=bound, note=note))
    return lines


async def through_the_chain(address: str, pause: float) -> list[float]:
    """Seconds to the first message of each of many requests, one at a time."""
    times = []
    async with ClientConnections(address) as made:
        for seed in range(NUM_LONE):
            await asyncio.sleep(pause)
            start, first = perf_counter(), 0.0
            async for _ in made.stubs[0].Generate(ask(seed, LONE_TOKENS)):
                first = first or perf_counter() - start
            times.append(first)
    return times[NUM_LONE // 10 :]


def in_process(speech: Speech) -> list[float]:
    """Seconds of the work itself: tokenize, schedule, take a token in, detokenize."""
    capacity = WorkerCapacity(4096, 16, 8, 1024, speech.tokenizer.vocab_size, "m", "float32", "cpu")
    core, table = core_of(capacity, Policy()), StreamTable(DecoderFactory(speech.tokenizer))
    times = []
    for seed in range(NUM_LONE):
        proto = ask(seed, LONE_TOKENS)
        start = perf_counter()
        core.add(asked(str(seed), speech.tokenizer.encode(proto.text), max_tokens=LONE_TOKENS, seed=seed), 0.0)
        plan = core.schedule(WORKER)
        assert plan is not None
        core.apply(WORKER, StepResult(plan.epoch, plan.step_id, [1], [speech.token(seed, 0)]))
        for batch in core.outbound.take_batches().values():
            table.apply(batch)
        table.take_texts()
        times.append(perf_counter() - start)
        core.abort(str(seed))
    return times[NUM_LONE // 10 :]


# -- under load


class StreamSample(msgspec.Struct):
    """One moment: what clients had received, and every process's usage."""

    received: Received
    usages: dict[str, ProcessUsage]

    @property
    def time(self) -> float:
        return self.received.time


def load(running: LocalDeployment, args: argparse.Namespace) -> list[StreamSample]:
    """Samples once a second, to the end of the last stream."""
    return [
        StreamSample(received, running.usages() | {CLIENTS: usage(received.pid)})
        for received in offered(
            running.address, streams=args.streams, seconds=args.seconds, tokens=args.tokens, channels=args.channels
        )
    ]


def lines_of(samples: list[StreamSample], args: argparse.Namespace) -> list[Result]:
    busy, end = full_load(samples, WARM_SECONDS, args.seconds), samples[-1].received
    first, middle, last = busy[0], busy[len(busy) // 2], busy[-1]
    elapsed, tokens = last.time - first.time, max(1, last.received.tokens - first.received.tokens)
    lines = []
    for name in first.usages:
        spent = last.usages[name].seconds - first.usages[name].seconds
        note = f"{100 * spent / elapsed:.0f}% of a core"
        lines.append(Result(f"{name}: processor time per token", 1e6 * spent / tokens, "us", note=note))
    for name in first.usages:
        mib = [sample.usages[name].resident / 2**20 for sample in (first, middle, last)]
        note = "MiB at start, middle, end: " + ", ".join(f"{value:.0f}" for value in mib)
        bound = MAX_GROWTH if name != CLIENTS else None
        lines.append(Result(f"{name}: memory grown since the middle", mib[2] - mib[1], "MiB", at_most=bound, note=note))
    num_messages = max(1, last.received.messages - first.received.messages)
    wrong = "; ".join([f"of {end.finished}", *end.wrong])
    return [
        *lines,
        Result("tokens per gRPC message", tokens / num_messages),
        Result("wrong streams", len(end.wrong), at_most=0, note=wrong),
        Result(f"tokens per second, {args.streams} streams", tokens / elapsed, "/s", at_least=TARGET_TOKENS),
    ]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--step-ms", type=float, default=25)
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--channels", type=int, default=16, help="connections that the streams share")
    parser.add_argument("--idle-seconds", type=float, default=10, help="0: leave that part out, and the first token's")
    args = parser.parse_args()
    lines = []
    if args.idle_seconds:
        with with_stand_in(0.0) as running:
            lines += idle(running, args.idle_seconds)
            lines += added_to_first_token(running.address)
    with with_stand_in(args.step_ms, max_num_seqs=args.streams, log_level="warning") as running:
        lines += lines_of(load(running, args), args)
    title = f"{args.streams} streams, steps of {args.step_ms:g} ms, {os.cpu_count()} cores shared by all"
    return finish(lines, check=args.check, title=title)
