"""What misuse of the gateway's doors costs others: `scripts/bench_doors [--check] [--seconds 6] [--rounds 3]`

A whole troupe of real processes with the bundled model.  `--streams` streams generate all the time.  Compared are the
times between their tokens, undisturbed and while a client in another process

- sends megabytes that are refused, as fast as it can, over HTTP and over gRPC;
- has 4 MB of text tokenized, four at a time;
- begins 30 bodies of 31 MB and lets the last byte be.

Each phase in which something is done lies between two undisturbed ones, and is compared with those two: a machine is
now faster, now slower, by more than what is measured.  How much those two differ says what the comparison can tell.
Processors are kept from halting (`scripts/bench/host.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from scripts.bench.host import awake
from scripts.bench.report import Result, add_check, finish
from scripts.bench.structured.attack import (
    WARM_SECONDS,
    AttackOutcome,
    StructuredBench,
    Turn,
    change,
    disturbed,
    rest,
    together,
    undisturbed,
)
from scripts.bench.tokens import MODEL
from services.cli.private import with_private_deployment
from shared.config import Settings

MAX_CHANGE = 10.0  # percent of the p99 between tokens
ATTACKER = "scripts.bench.doors.attacker"


class DoorAttacker:
    """The process that attacks."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.kinds: list[str] = []

    async def attack(self, kind: str, seconds: float) -> AttackOutcome:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, seconds]).encode() + b"\n")
        return msgspec.json.decode(await self.said(), type=AttackOutcome)

    async def said(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()


@asynccontextmanager
async def attacker(grpc_address: str, http_address: str) -> AsyncIterator[DoorAttacker]:
    command = (sys.executable, "-m", ATTACKER, "--grpc", grpc_address, "--http", http_address)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        made = DoorAttacker(process)
        made.kinds = msgspec.json.decode(await made.said(), type=list[str])
        yield made
    finally:
        process.kill()
        await process.wait()


class DoorsBench(StructuredBench):
    """The streams, and how they fare beside each attack in turn."""

    async def compare(self, hostile: DoorAttacker, args: argparse.Namespace) -> None:
        streams = [asyncio.create_task(self.stream(seed)) for seed in range(args.streams)]
        await asyncio.sleep(WARM_SECONDS)
        for number in range(1, args.rounds + 1):
            before, taken_before, _ = await self._measured(rest(args.seconds))
            for kind in hostile.kinds:
                during, taken, came = await self._measured(hostile.attack(kind, args.seconds))
                await asyncio.sleep(args.pause)
                after, taken_after, _ = await self._measured(rest(args.seconds))
                turn = Turn(before, during, after, came, max(taken_before, taken, taken_after))
                self.turns.setdefault(kind, []).append(turn)
                before, taken_before = after, taken_after
            said = (f"{kind} {turns[-1].change:+.1f} %" for kind, turns in self.turns.items())
            print(f"round {number}: {', '.join(said)}", flush=True)
        self._is_over = True
        await asyncio.gather(*streams)


def lines(turns: dict[str, list[Turn]]) -> list[Result]:
    every = [turn for each in turns.values() for turn in each]
    quiet = undisturbed(every)
    first, second = (together(phases).p(0.99) for phases in zip(*((t.before, t.after) for t in every), strict=True))
    found = [
        Result("between tokens, p50, undisturbed", quiet.p(0.5), "ms", note=f"{len(quiet.gaps)} tokens"),
        Result("between tokens, p99, undisturbed", quiet.p(0.99), "ms", note=f"{first:.1f} before, {second:.1f} after"),
    ]
    for kind, each in turns.items():
        endings = sum((Counter(turn.came.endings) for turn in each), Counter[str]())
        said = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
        several = "turns: " + " ".join(f"{turn.change:+.1f}" for turn in each)
        found += [
            Result(f"{kind}: p99", disturbed(each).p(0.99), "ms", note=said),
            Result(f"{kind}: change of the p99", change(each), "%", at_most=MAX_CHANGE, note=several),
        ]
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3, help="of one phase of each attack")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds after an attack, for what it has left behind")
    parser.add_argument("--streams", type=int, default=16)
    args = parser.parse_args(arguments)
    settings = Settings.of(model=str(MODEL), max_num_seqs=args.streams + 8)
    with awake():
        return with_private_deployment(settings, lambda running: asyncio.run(measure(running, args)), http_port=0)


async def measure(settings: Settings, args: argparse.Namespace) -> int:
    gateway = settings.gateway
    grpc_address, http_address = (f"{gateway.host}:{port}" for port in (gateway.port, gateway.http_port))
    bench = DoorsBench(grpc_address)
    async with bench.client, attacker(grpc_address, http_address) as hostile:
        await bench.compare(hostile, args)
        return finish(lines(bench.turns), check=args.check, title="Doors")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
