"""What hostile grammars cost those who did not send them: `scripts/bench_structured [--check] [--seconds 15]`

A whole troupe of real processes with the bundled model.  `--streams` streams generate all the time; in every second
phase hostile grammars arrive meanwhile, one after the other, each another than all before.  Compared are the times
between the tokens of the streams, with and without, phase by phase; and each hostile request has to end within two
seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from scripts.bench.report import Line, add_check, finish
from scripts.bench.structured.hostile import hostile
from scripts.bench.tokens import MODEL
from services.cli.private import with_private_troupe
from shared.client import CallError, Client
from shared.config import Settings

MAX_CHANGE = 5.0  # percent of the p99 between tokens
MAX_SECONDS = 2.0  # of a hostile request
WARM_SECONDS = 4.0
FEW_TOKENS = 8  # of a hostile request that is served after all


@dataclass
class Phase:
    """Milliseconds between tokens, over all streams."""

    gaps: list[float] = field(default_factory=list)

    def p(self, share: float) -> float:
        return sorted(self.gaps)[int(share * len(self.gaps))]


@dataclass
class Attack:
    seconds: dict[str, float] = field(default_factory=dict)  # the longest of each
    endings: Counter[str] = field(default_factory=Counter)


class Bench:
    """Streams and attackers in one process."""

    def __init__(self, address: str) -> None:
        self.client = Client(address)
        self.quiet, self.attacked = Phase(), Phase()
        self.phase: Phase | None = None
        self.attack = Attack()
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

    async def harass(self, salts: itertools.count[int], until: float) -> None:
        for name, grammar in hostile(next(salts)).items():
            if time.monotonic() > until:
                return
            begin, ending = time.perf_counter(), "served"
            try:
                await self.client.generate("Once", grammar=grammar, max_tokens=FEW_TOKENS, timeout=20)
            except CallError as error:
                ending = error.code if isinstance(error.code, str) else error.code.name
            self.attack.endings[ending] += 1
            known = self.attack.seconds.get(name, 0.0)
            self.attack.seconds[name] = max(known, time.perf_counter() - begin)

    async def run(self, num_streams: int, seconds: float, rounds: int) -> None:
        salts = itertools.count()
        streams = [asyncio.create_task(self.stream(seed)) for seed in range(num_streams)]
        await asyncio.sleep(WARM_SECONDS)
        await self.harass(salts, time.monotonic() + seconds)  # once, so that what starts late has started
        for _ in range(rounds):
            self.phase = self.quiet
            await asyncio.sleep(seconds)
            self.phase = self.attacked
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                await self.harass(salts, until)
        self.phase, self._is_over = None, True
        await asyncio.gather(*streams)

    def lines(self) -> list[Line]:
        change = 100 * (self.attacked.p(0.99) / self.quiet.p(0.99) - 1)
        slowest = max(self.attack.seconds, key=lambda name: self.attack.seconds[name])
        endings = ", ".join(f"{count} {ending}" for ending, count in self.attack.endings.most_common())
        return [
            Line("between tokens, p50, undisturbed", self.quiet.p(0.5), "ms", note=f"{len(self.quiet.gaps)} tokens"),
            Line("between tokens, p50, under attack", self.attacked.p(0.5), "ms"),
            Line("between tokens, p99, undisturbed", self.quiet.p(0.99), "ms"),
            Line("between tokens, p99, under attack", self.attacked.p(0.99), "ms"),
            Line("change of the p99", change, "%", at_most=MAX_CHANGE),
            Line("slowest hostile request", self.attack.seconds[slowest], "s", at_most=MAX_SECONDS, note=slowest),
            Line("hostile requests", sum(self.attack.endings.values()), note=endings),
        ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=4, help="of an undisturbed phase and an attacked one")
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args(arguments)
    settings = msgspec.convert({"model": str(MODEL), "max_num_seqs": args.streams + 8}, Settings)
    return with_private_troupe(settings, lambda running: asyncio.run(measure(running, args)))


async def measure(settings: Settings, args: argparse.Namespace) -> int:
    bench = Bench(f"{settings.host}:{settings.port}")
    async with bench.client:
        await bench.run(args.streams, args.seconds, args.rounds)
    for name, seconds in bench.attack.seconds.items():
        print(f"{name:24} {seconds:6.2f} s at most")
    return finish(bench.lines(), check=args.check, title="Hostile grammars")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
