"""What hostile grammars cost those who did not send them: `scripts/bench_structured [--check] [--seconds 8]`

A whole troupe of real processes with the bundled model.  `--streams` streams generate all the time.  Compared are the
times between their tokens in phases of five kinds, in turns: undisturbed; while hostile grammars arrive, one after
another and each unlike all before; while as many harmless formats arrive; while as many requests without a format do;
and beside a process that only counts, with the priority that compilers have.  The last three say what any work costs on
the machine at hand.  Each hostile request has to end within two seconds.  Processors are kept from halting
(`scripts/bench/host.py`), and a round in which the host took more than 2 % of them does not count, as long as there is
another.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import msgspec

from scripts.bench.host import QUIET, Host, awake
from scripts.bench.report import Line, add_check, finish
from scripts.bench.tokens import MODEL
from services.cli.private import with_private_troupe
from shared.client import Client
from shared.config import Settings
from shared.metrics import percentile

MAX_CHANGE = 5.0  # percent of the p99 between tokens
MAX_SECONDS = 2.0  # of a hostile request
WARM_SECONDS = 8.0
LENGTHS = (200, 600)  # tokens of a stream
ATTACKER = "scripts.bench.structured.attacker"
COUNTING = "from shared.idle_time import take_idle_time_only; take_idle_time_only()\nwhile True: pass"

T = TypeVar("T")


@dataclass
class Phase:
    """Milliseconds between tokens, over all streams."""

    gaps: list[float] = field(default_factory=list)

    def p(self, share: float) -> float:
        return sorted(self.gaps)[int(share * len(self.gaps))]


class Came(msgspec.Struct, frozen=True):
    """What came of one attack."""

    slowest: dict[str, float]  # seconds of the longest request of each kind
    endings: dict[str, int]


class Attacker:
    """The process that attacks."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._pace = 1.0  # seconds for each request of the last attack

    async def attack(self, seconds: float) -> Came:
        came = await self._ask("hostile", seconds, 0.0)
        self._pace = seconds / max(1, sum(came.endings.values()))
        return came

    async def send(self, kind: str, seconds: float) -> Came:
        """As many requests as in the last attack, harmless or plain ones."""
        return await self._ask(kind, seconds, self._pace)

    async def _ask(self, kind: str, seconds: float, pace: float) -> Came:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {seconds} {pace}\n".encode())
        return msgspec.json.decode(await self.said(), type=Came)

    async def said(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()


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


NOTHING = Came({}, {})


@dataclass
class Round:
    """A phase of each kind, and the largest share that the host took of one of them."""

    quiet: Phase = field(default_factory=Phase)
    attacked: Phase = field(default_factory=Phase)
    harmless: Phase = field(default_factory=Phase)
    plain: Phase = field(default_factory=Phase)
    counting: Phase = field(default_factory=Phase)
    hostile: Came = NOTHING
    served: Came = NOTHING
    taken: float = 0.0


def together(phases: Iterable[Phase]) -> Phase:
    return Phase([gap for phase in phases for gap in phase.gaps])


class Bench:
    """The streams, and how they fare."""

    def __init__(self, address: str) -> None:
        self.client = Client(address)
        self.rounds: list[Round] = []
        self._phase: Phase | None = None
        self._is_over = False

    async def stream(self, seed: int) -> None:
        """Of unlike lengths: else all end and begin together, and the p99 is of who was counted at that moment."""
        lengths = Random(seed)
        while not self._is_over:
            seed += 1000
            num_tokens = lengths.randint(*LENGTHS)
            asked: Any = {"max_tokens": num_tokens, "ignore_eos": True, "seed": seed, "temperature": 1.0}
            async with self.client.stream("Once upon a time", **asked) as stream:
                await self._listen(stream)

    async def _listen(self, stream: Any) -> None:
        last = 0.0
        async for _ in stream:
            now = time.perf_counter()
            if last and self._phase is not None:
                self._phase.gaps.append(1000 * (now - last))
            last = now
            if self._is_over:
                return

    async def run(self, hostile: Attacker, args: argparse.Namespace) -> None:
        """Rounds until enough were quiet, or `--tries` times as many; the quietest are kept."""
        streams = [asyncio.create_task(self.stream(seed)) for seed in range(args.streams)]
        await asyncio.sleep(WARM_SECONDS)
        await hostile.attack(args.seconds)  # once, so that what starts late has started
        while len(self.rounds) < args.tries * args.rounds and self._num_quiet < args.rounds:
            self.rounds.append(await self._round(hostile, args.seconds))
            print(f"round {len(self.rounds)}: the host took {100 * self.rounds[-1].taken:.1f} %", flush=True)
        self.rounds = sorted(self.rounds, key=lambda each: each.taken)[: args.rounds]
        self._phase, self._is_over = None, True
        await asyncio.gather(*streams)

    @property
    def _num_quiet(self) -> int:
        return sum(each.taken <= QUIET for each in self.rounds)

    async def _round(self, hostile: Attacker, seconds: float) -> Round:
        made, host = Round(), Host()

        async def phase(phase: Phase, doing: Awaitable[T]) -> T:
            self._phase = phase
            done = await doing
            made.taken = max(made.taken, host.taken())
            return done

        await phase(made.quiet, asyncio.sleep(seconds))
        made.hostile = await phase(made.attacked, hostile.attack(seconds))
        made.served = await phase(made.harmless, hostile.send("harmless", seconds))
        await phase(made.plain, hostile.send("plain", seconds))
        await phase(made.counting, count(seconds))
        return made


def lines(rounds: Sequence[Round]) -> list[Line]:
    undisturbed = together(each.quiet for each in rounds)
    attacked = together(each.attacked for each in rounds)
    quiet = undisturbed.p(0.99)
    changes = {
        name: 100 * (phase.p(0.99) / quiet - 1)
        for name, phase in (
            ("under attack", attacked),
            ("with harmless formats", together(each.harmless for each in rounds)),
            ("with as many plain requests", together(each.plain for each in rounds)),
            ("beside a counting process", together(each.counting for each in rounds)),
        )
    }
    taken = 100 * max(each.taken for each in rounds)
    slowest, kind = max((slow, kind) for each in rounds for kind, slow in each.hostile.slowest.items())
    endings = sum((Counter(each.hostile.endings) for each in rounds), Counter[str]())
    said = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
    served = [slow for each in rounds for slow in each.served.slowest.values()]
    answered = sum((Counter(each.served.endings) for each in rounds), Counter[str]())
    return [
        Line("rounds", len(rounds), note=f"the host took at most {taken:.1f} % of a phase"),
        Line("between tokens, p50, undisturbed", undisturbed.p(0.5), "ms", note=f"{len(undisturbed.gaps)} tokens"),
        Line("between tokens, p50, under attack", attacked.p(0.5), "ms"),
        Line("between tokens, p99, undisturbed", quiet, "ms"),
        Line("between tokens, p99, under attack", attacked.p(0.99), "ms"),
        *(
            Line(f"change of the p99 {name}", change, "%", at_most=MAX_CHANGE if name == "under attack" else None)
            for name, change in changes.items()
        ),
        Line("slowest hostile request", slowest, "s", at_most=MAX_SECONDS, note=kind),
        Line("slowest harmless request", max(served), "s", note=f"median of phases {percentile(served, 50):.2f} s"),
        Line("harmless requests", answered.total(), note=f"{answered['served']} served"),
        Line("hostile requests", endings.total(), note=said),
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=8, help="of one phase of each kind")
    parser.add_argument("--tries", type=int, default=4, help="times as many rounds, while the host takes much")
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args(arguments)
    settings = msgspec.convert({"model": str(MODEL), "max_num_seqs": args.streams + 8}, Settings)
    with awake():
        return with_private_troupe(settings, lambda running: asyncio.run(measure(running, args)))


async def measure(settings: Settings, args: argparse.Namespace) -> int:
    address = f"{settings.host}:{settings.port}"
    bench = Bench(address)
    async with bench.client, attacker(address) as hostile:
        await bench.run(hostile, args)
        return finish(lines(bench.rounds), check=args.check, title="Hostile grammars")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
