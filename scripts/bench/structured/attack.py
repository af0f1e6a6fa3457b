"""What hostile grammars cost those who did not send them: `scripts/bench_structured [--check] [--seconds 6]`

A whole troupe of real processes with the bundled model.  `--streams` streams generate all the time.  Compared are the
times between their tokens: undisturbed; while hostile grammars arrive, one after another and each unlike all before;
while as many harmless formats arrive; while as many requests without a format do; and beside a process that only
counts, with the priority that compilers have.  The last three say what any work costs on the machine at hand.

A machine is now faster, now slower, by more than what is measured: each phase in which something is done lies between
two undisturbed ones, and is compared with those two.  How much those differ from each other says what the comparison
can tell.  Each hostile request has to end within two seconds.  Processors are kept from halting
(`scripts/bench/host.py`), and a phase in which, or beside which, the host took more than 2 % of them does not count, as
long as there is another.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import msgspec

from scripts.bench.host import QUIET, Host, awake
from scripts.bench.report import Result, add_check, finish
from scripts.bench.tokens import MODEL
from services.cli.private import with_private_deployment
from shared.client import Client
from shared.config import Settings
from shared.metrics import percentile

MAX_CHANGE = 5.0  # percent of the p99 between tokens
MAX_SECONDS = 2.0  # of a hostile request
WARM_SECONDS = 8.0
SETTLING_SECONDS = 0.5  # between phases, for what the last one left behind
LENGTHS = (200, 600)  # tokens of a stream
ATTACKER = "scripts.bench.structured.attacker"
HOSTILE, HARMLESS, PLAIN = "under attack", "with harmless formats", "with as many plain requests"
BESIDE = "beside a counting process"
ROUND = (HOSTILE, HARMLESS, HOSTILE, PLAIN, HOSTILE, BESIDE)  # what is to be known best comes most often
COUNTING = "from shared.idle_time import take_idle_time_only; take_idle_time_only()\nwhile True: pass"

T = TypeVar("T")


@dataclass
class AttackPhase:
    """Milliseconds between tokens, over all streams."""

    gaps: list[float] = field(default_factory=list)

    def p(self, share: float) -> float:
        return sorted(self.gaps)[int(share * len(self.gaps))]


class AttackOutcome(msgspec.Struct, frozen=True):
    """What came of one attack."""

    slowest: dict[str, float]  # seconds of the longest request of each kind
    endings: dict[str, int]


NOTHING = AttackOutcome({}, {})


class AttackProcess:
    """The process that attacks."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._pace = 1.0  # seconds for each request of the last attack

    async def attack(self, seconds: float) -> AttackOutcome:
        came = await self._ask("hostile", seconds, 0.0)
        self._pace = seconds / max(1, sum(came.endings.values()))
        return came

    async def send(self, kind: str, seconds: float) -> AttackOutcome:
        """As many requests as in the last attack, harmless or plain ones."""
        return await self._ask(kind, seconds, self._pace)

    async def _ask(self, kind: str, seconds: float, pace: float) -> AttackOutcome:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {seconds} {pace}\n".encode())
        return msgspec.json.decode(await self.said(), type=AttackOutcome)

    async def said(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()


@asynccontextmanager
async def attacker(address: str) -> AsyncIterator[AttackProcess]:
    command = (sys.executable, "-m", ATTACKER, "--address", address)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        made = AttackProcess(process)
        await made.said()  # its grammars are made
        yield made
    finally:
        process.kill()
        await process.wait()


async def count(seconds: float) -> AttackOutcome:
    """A process counts, and takes idle time only."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", COUNTING)
    await asyncio.sleep(seconds)
    process.kill()
    await process.wait()
    return NOTHING


async def rest(seconds: float) -> AttackOutcome:
    await asyncio.sleep(seconds)
    return NOTHING


@dataclass
class Turn:
    """Something was done, between two undisturbed phases."""

    before: AttackPhase
    during: AttackPhase
    after: AttackPhase
    came: AttackOutcome
    taken: float  # the largest share that the host took of one of the three

    @property
    def change(self) -> float:
        return change([self])


def together(phases: Iterable[AttackPhase]) -> AttackPhase:
    return AttackPhase([gap for phase in phases for gap in phase.gaps])


def undisturbed(turns: Sequence[Turn]) -> AttackPhase:
    return together(phase for turn in turns for phase in (turn.before, turn.after))


def disturbed(turns: Sequence[Turn]) -> AttackPhase:
    return together(turn.during for turn in turns)


def change(turns: Sequence[Turn]) -> float:
    """Of the p99, in percent."""
    return 100 * (disturbed(turns).p(0.99) / undisturbed(turns).p(0.99) - 1)


class StructuredBench:
    """The streams, and how they fare."""

    def __init__(self, address: str) -> None:
        self.client = Client(address)
        self.turns: dict[str, list[Turn]] = {}
        self._phase: AttackPhase | None = None
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

    async def run(self, hostile: AttackProcess, args: argparse.Namespace) -> None:
        """Rounds of turns until enough of each kind were quiet, or `--tries` times as many; the quietest are kept."""
        streams = [asyncio.create_task(self.stream(seed)) for seed in range(args.streams)]
        await asyncio.sleep(WARM_SECONDS)
        await hostile.attack(args.seconds)  # once, so that what starts late has started
        for number in range(1, args.tries * args.rounds + 1):
            await self._round(hostile, args.seconds)
            said = (f"{kind} {turns[-1].change:+.1f} %" for kind, turns in self.turns.items())
            taken = max(turns[-1].taken for turns in self.turns.values())
            print(f"round {number}: {', '.join(said)}; the host took {100 * taken:.1f} %", flush=True)
            if all(len(self._quietest(kind, args.rounds, QUIET)) == args.rounds * ROUND.count(kind) for kind in ROUND):
                break
        self.turns = {kind: self._quietest(kind, args.rounds) for kind in self.turns}
        self._is_over = True
        await asyncio.gather(*streams)

    def _quietest(self, kind: str, num_rounds: int, most: float = math.inf) -> list[Turn]:
        """As many turns as so many rounds have, of those in which the host took at most so much."""
        turns = sorted((turn for turn in self.turns[kind] if turn.taken <= most), key=lambda turn: turn.taken)
        return turns[: num_rounds * ROUND.count(kind)]

    async def _round(self, hostile: AttackProcess, seconds: float) -> None:
        doings: dict[str, Callable[[], Awaitable[AttackOutcome]]] = {
            HOSTILE: lambda: hostile.attack(seconds),
            HARMLESS: lambda: hostile.send("harmless", seconds),
            PLAIN: lambda: hostile.send("plain", seconds),
            BESIDE: lambda: count(seconds),
        }
        before, taken_before, _ = await self._measured(rest(seconds))
        for kind in ROUND:
            during, taken, came = await self._measured(doings[kind]())
            after, taken_after, _ = await self._measured(rest(seconds))
            turn = Turn(before, during, after, came, max(taken_before, taken, taken_after))
            self.turns.setdefault(kind, []).append(turn)
            before, taken_before = after, taken_after

    async def _measured(self, doing: Awaitable[T]) -> tuple[AttackPhase, float, T]:
        """The phase, the share that the host took of it, and what came of what was done."""
        await asyncio.sleep(SETTLING_SECONDS)
        phase, host = AttackPhase(), Host()
        self._phase = phase
        done = await doing
        self._phase = None
        return phase, host.taken(), done


def lines(turns: dict[str, list[Turn]]) -> list[Result]:
    attacks = turns[HOSTILE]
    taken = 100 * max(turn.taken for each in turns.values() for turn in each)
    slowest, kind = max((slow, kind) for turn in attacks for kind, slow in turn.came.slowest.items())
    endings = sum((Counter(turn.came.endings) for turn in attacks), Counter[str]())
    said = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
    served = [slow for turn in turns[HARMLESS] for slow in turn.came.slowest.values()]
    answered = sum((Counter(turn.came.endings) for turn in turns[HARMLESS]), Counter[str]())
    quiet, attacked = undisturbed(attacks), disturbed(attacks)
    first, second = (together(phases).p(0.99) for phases in zip(*((t.before, t.after) for t in attacks), strict=True))
    return [
        Result("attacks", len(attacks), note=f"the host took at most {taken:.1f} % of a phase"),
        Result("between tokens, p50, undisturbed", quiet.p(0.5), "ms", note=f"{len(quiet.gaps)} tokens"),
        Result("between tokens, p50, under attack", attacked.p(0.5), "ms", note=f"{len(attacked.gaps)} tokens"),
        Result("between tokens, p99, undisturbed", quiet.p(0.99), "ms", note=f"{first:.1f} before, {second:.1f} after"),
        Result("between tokens, p99, under attack", attacked.p(0.99), "ms"),
        *(
            Result(
                f"change of the p99 {kind}",
                change(each),
                "%",
                at_most=MAX_CHANGE if kind == HOSTILE else None,
                note="turns: " + " ".join(f"{turn.change:+.1f}" for turn in each),
            )
            for kind, each in turns.items()
        ),
        Result("slowest hostile request", slowest, "s", at_most=MAX_SECONDS, note=kind),
        Result("slowest harmless request", max(served), "s", note=f"median of phases {percentile(served, 50):.2f} s"),
        Result("harmless requests", answered.total(), note=f"{answered['served']} served"),
        Result("hostile requests", endings.total(), note=said),
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_check(parser)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=5, help="of three attacks and one phase of each other kind")
    parser.add_argument("--tries", type=int, default=4, help="times as many rounds, while the host takes much")
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args(arguments)
    settings = Settings.of(model=str(MODEL), max_num_seqs=args.streams + 8)
    with awake():
        return with_private_deployment(settings, lambda running: asyncio.run(measure(running, args)))


async def measure(settings: Settings, args: argparse.Namespace) -> int:
    address = f"{settings.gateway.host}:{settings.gateway.port}"
    bench = StructuredBench(address)
    async with bench.client, attacker(address) as hostile:
        await bench.run(hostile, args)
        return finish(lines(bench.turns), check=args.check, title="Hostile grammars")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
