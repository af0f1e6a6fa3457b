"""What hostile grammars cost those who did not send them: `scripts/bench_structured [--check] [--seconds 6]`

A whole troupe of real processes with the bundled model.  `--streams` streams generate all the time.  Compared are the
times between their tokens in phases of four kinds, in turns: undisturbed; while hostile grammars arrive, one after
another and each unlike all before; while as many harmless formats arrive; and beside a process that only counts, with
the priority that compilers have.  The last two say what any work costs on the machine at hand.  Each hostile request
has to end within two seconds.
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
COUNTING = "from shared.idle_time import take_idle_time_only; take_idle_time_only()\nwhile True: pass"


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
        self._pace = 1.0  # seconds for each request of the last attack

    async def attack(self, seconds: float) -> None:
        said = await self._ask(seconds, 0.0)
        self.endings.update(said["endings"])
        self._pace = seconds / max(1, sum(said["endings"].values()))
        for name, longest in said["slowest"].items():
            self.slowest[name] = max(longest, self.slowest.get(name, 0.0))

    async def be_harmless(self, seconds: float) -> None:
        """As many requests as in the last attack."""
        await self._ask(seconds, self._pace)

    async def _ask(self, seconds: float, pace: float) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds} {pace}\n".encode())
        return await self.said()

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


async def count(seconds: float) -> None:
    """A process counts, and takes idle time only."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", COUNTING)
    await asyncio.sleep(seconds)
    process.kill()
    await process.wait()


class Bench:
    """The streams, and how they fare."""

    def __init__(self, address: str) -> None:
        self.client = Client(address)
        self.quiet, self.attacked, self.harmless, self.counting = Phase(), Phase(), Phase(), Phase()
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
            self.phase = self.harmless
            await hostile.be_harmless(seconds)
            self.phase = self.counting
            await count(seconds)
        self.phase, self._is_over = None, True
        await asyncio.gather(*streams)


def lines(bench: Bench, hostile: Attacker) -> list[Line]:
    quiet = bench.quiet.p(0.99)
    changes = {
        name: 100 * (phase.p(0.99) / quiet - 1)
        for name, phase in (
            ("under attack", bench.attacked),
            ("with harmless formats", bench.harmless),
            ("beside a counting process", bench.counting),
        )
    }
    slowest = max(hostile.slowest, key=lambda name: hostile.slowest[name])
    endings = ", ".join(f"{count} {ending}" for ending, count in hostile.endings.most_common())
    return [
        Line("between tokens, p50, undisturbed", bench.quiet.p(0.5), "ms", note=f"{len(bench.quiet.gaps)} tokens"),
        Line("between tokens, p50, under attack", bench.attacked.p(0.5), "ms"),
        Line("between tokens, p99, undisturbed", quiet, "ms"),
        Line("between tokens, p99, under attack", bench.attacked.p(0.99), "ms"),
        *(
            Line(f"change of the p99 {name}", change, "%", at_most=MAX_CHANGE if name == "under attack" else None)
            for name, change in changes.items()
        ),
        Line("slowest hostile request", hostile.slowest[slowest], "s", at_most=MAX_SECONDS, note=slowest),
        Line("hostile requests", hostile.endings.total(), note=endings),
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=6, help="of one phase of each kind")
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
