"""What hostile grammars cost those who did not send them: `scripts/bench_structured [--check] [--seconds 8]`

A whole troupe of real processes with the bundled model.  `--streams` streams generate all the time; in every second
phase hostile grammars arrive meanwhile, one after the other, each another than all before.  Compared are the times
between the tokens of the streams, with and without, phase by phase; and each hostile request has to end within two
seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from scripts.bench.report import Line, add_check, finish
from scripts.bench.tokens import MODEL
from services.cli.private import with_private_troupe
from shared.client import Client
from shared.config import Settings

MAX_CHANGE = 5.0  # percent of the p99 between tokens
MAX_SECONDS = 2.0  # of a hostile request
WARM_SECONDS = 4.0
ATTACKER = "scripts.bench.structured.attacker"


@dataclass
class Phase:
    """Milliseconds between tokens, over all streams."""

    gaps: list[float] = field(default_factory=list)

    def p(self, share: float) -> float:
        return sorted(self.gaps)[int(share * len(self.gaps))]


class Attacker:
    """The process that attacks, and what came of it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.slowest: dict[str, float] = {}  # seconds of the longest of each kind
        self.endings: Counter[str] = Counter()

    async def attack(self, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n".encode())
        said = await self.said()
        self.endings.update(said["endings"])
        for name, longest in said["slowest"].items():
            self.slowest[name] = max(longest, self.slowest.get(name, 0.0))

    async def said(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(await self._process.stdout.readline())


@asynccontextmanager
async def attacker(address: str) -> AsyncIterator[Attacker]:
    command = (sys.executable, "-m", ATTACKER, "--address", address)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        made = Attacker(process)
        await made.said()  # its grammars are made
        yield made
    finally:
        process.kill()
        await process.wait()


class Bench:
    """The streams, and how they fare."""

    def __init__(self, address: str) -> None:
        self.client = Client(address)
        self.quiet, self.attacked = Phase(), Phase()
        self.phase: Phase | None = None
        self._is_over = False

    async def stream(self, seed: int) -> None:
        while not self._is_over:
            seed += 1000
            asked: Any = {"max_tokens": 400, "ignore_eos": True, "seed": seed, "temperature": 1.0}
            async with self.client.stream("Once upon a time", **asked) as stream:
                await self._listen(stream)

    async def _listen(self, stream: Any) -> None:
        last = 0.0
        async for _ in stream:
            now = time.perf_counter()
            if last and self.phase is not None:
                self.phase.gaps.append(1000 * (now - last))
            last = now
            if self._is_over:
                return

    async def run(self, hostile: Attacker, num_streams: int, seconds: float, rounds: int) -> None:
        streams = [asyncio.create_task(self.stream(seed)) for seed in range(num_streams)]
        await asyncio.sleep(WARM_SECONDS)
        await hostile.attack(seconds)  # once, so that what starts late has started
        for _ in range(rounds):
            self.phase = self.quiet
            await asyncio.sleep(seconds)
            self.phase = self.attacked
            await hostile.attack(seconds)
        self.phase, self._is_over = None, True
        await asyncio.gather(*streams)


def lines(bench: Bench, hostile: Attacker) -> list[Line]:
    change = 100 * (bench.attacked.p(0.99) / bench.quiet.p(0.99) - 1)
    slowest = max(hostile.slowest, key=lambda name: hostile.slowest[name])
    endings = ", ".join(f"{count} {ending}" for ending, count in hostile.endings.most_common())
    return [
        Line("between tokens, p50, undisturbed", bench.quiet.p(0.5), "ms", note=f"{len(bench.quiet.gaps)} tokens"),
        Line("between tokens, p50, under attack", bench.attacked.p(0.5), "ms"),
        Line("between tokens, p99, undisturbed", bench.quiet.p(0.99), "ms"),
        Line("between tokens, p99, under attack", bench.attacked.p(0.99), "ms"),
        Line("change of the p99", change, "%", at_most=MAX_CHANGE),
        Line("slowest hostile request", hostile.slowest[slowest], "s", at_most=MAX_SECONDS, note=slowest),
        Line("hostile requests", hostile.endings.total(), note=endings),
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=8, help="of an undisturbed phase and an attacked one")
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args(arguments)
    settings = msgspec.convert({"model": str(MODEL), "max_num_seqs": args.streams + 8}, Settings)
    return with_private_troupe(settings, lambda running: asyncio.run(measure(running, args)))


async def measure(settings: Settings, args: argparse.Namespace) -> int:
    address = f"{settings.host}:{settings.port}"
    bench = Bench(address)
    async with bench.client, attacker(address) as hostile:
        await bench.run(hostile, args.streams, args.seconds, args.rounds)
        for name, seconds in hostile.slowest.items():
            print(f"{name:24} {seconds:6.2f} s at most")
        return finish(lines(bench, hostile), check=args.check, title="Hostile grammars")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
