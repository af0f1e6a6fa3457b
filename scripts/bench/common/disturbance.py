"""What a disturbance costs streams that do not cause it: the times between their tokens, undisturbed and disturbed.

A machine's speed drifts by more than what is measured.  So each phase in which something is done lies between two
undisturbed phases and is compared with those two; how much those two differ says what the comparison can tell.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import Any

import msgspec

from scripts.bench.common.host import QUIET, Host, awake
from scripts.bench.common.report import Result, finish
from scripts.bench.common.tokens import MODEL
from services.cli.supervision.private import with_private_deployment
from shared.client import Client
from shared.config import Settings
from shared.metrics import percentile

WARM_SECONDS = 8.0
SETTLING_SECONDS = 0.5  # between phases, for what the last one left behind
LENGTHS = (200, 600)  # tokens of a stream


class AttackOutcome(msgspec.Struct, frozen=True):
    """What came of one attack."""

    slowest: dict[str, float] = {}  # seconds of the longest request of each kind
    endings: dict[str, int] = {}


Doing = Callable[[float], Awaitable[AttackOutcome]]  # lasts so many seconds


class AttackProcess:
    """A process that attacks: `kinds` are the attacks that it knows."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.kinds: list[str] = []

    async def attack(self, kind: str, seconds: float, pace: float = 0.0) -> AttackOutcome:
        """`pace`: seconds from one request to the next, at least."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode([kind, seconds, pace]) + b"\n")
        return msgspec.json.decode(await self.said(), type=AttackOutcome)

    async def said(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()


@asynccontextmanager
async def attacker(module: str, *options: str) -> AsyncIterator[AttackProcess]:
    """The process that runs this module, once it is ready."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *options, stdin=PIPE, stdout=PIPE)
    try:
        made = AttackProcess(process)
        made.kinds = msgspec.json.decode(await made.said(), type=list[str])
        yield made
    finally:
        process.kill()
        await process.wait()


async def obey(attacks: Mapping[str, Callable[[float, float], Awaitable[AttackOutcome]]]) -> None:
    """The attacker's side: print the kinds, then make each attack that standard input names, and print its outcome."""
    print(msgspec.json.encode(sorted(attacks)).decode(), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        kind, seconds, pace = msgspec.json.decode(line)
        print(msgspec.json.encode(await attacks[kind](seconds, pace)).decode(), flush=True)


async def rest(seconds: float) -> AttackOutcome:
    await asyncio.sleep(seconds)
    return AttackOutcome()


@dataclass
class Turn:
    """Something was done between two undisturbed phases; of each phase milliseconds between tokens, of all streams."""

    before: list[float]
    during: list[float]
    after: list[float]
    came: AttackOutcome
    taken: float  # the largest share that the host took of one of the three

    @property
    def change(self) -> float:
        return change([self])


Turns = dict[str, list[Turn]]  # by what was done


def joined(phases: Iterable[list[float]]) -> list[float]:
    return list(chain.from_iterable(phases))


def undisturbed(turns: Sequence[Turn]) -> list[float]:
    return joined(phase for turn in turns for phase in (turn.before, turn.after))


def disturbed(turns: Sequence[Turn]) -> list[float]:
    return joined(turn.during for turn in turns)


def change(turns: Sequence[Turn]) -> float:
    """Of the p99, in percent."""
    return 100 * (percentile(disturbed(turns), 99) / percentile(undisturbed(turns), 99) - 1)


def endings(turns: Sequence[Turn]) -> Counter[str]:
    return sum((Counter(turn.came.endings) for turn in turns), Counter[str]())


def shown(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {ending}" for ending, count in counts.most_common())


def quiet_lines(turns: Sequence[Turn]) -> list[Result]:
    """The undisturbed phases, and by how much those before and after differ."""
    quiet = undisturbed(turns)
    first, second = (percentile(joined(side), 99) for side in zip(*((t.before, t.after) for t in turns), strict=True))
    note = f"{first:.1f} before, {second:.1f} after"
    return [
        Result("between tokens, p50, undisturbed", percentile(quiet, 50), "ms", note=f"{len(quiet)} tokens"),
        Result("between tokens, p99, undisturbed", percentile(quiet, 99), "ms", note=note),
    ]


def change_line(what: str, turns: Sequence[Turn], at_most: float | None) -> Result:
    note = "turns: " + " ".join(f"{turn.change:+.1f}" for turn in turns)
    return Result(what, change(turns), "%", at_most=at_most, note=note)


class BusyStreams:
    """Streams that generate all the time, and the times between their tokens while something is done."""

    def __init__(self, client: Client, num_streams: int) -> None:
        self.turns: Turns = {}
        self._client, self._num_streams = client, num_streams
        self._gaps: list[float] | None = None  # of the phase that is measured now
        self._is_over = False

    async def _stream(self, seed: int) -> None:
        """Of unlike lengths: else all end and begin together, and the p99 is of those that were counted just then."""
        lengths = Random(seed)
        while not self._is_over:
            seed += 1000
            num_tokens = lengths.randint(*LENGTHS)
            asked: Any = {"max_tokens": num_tokens, "ignore_eos": True, "seed": seed, "temperature": 1.0}
            async with self._client.stream("Once upon a time", **asked) as stream:
                await self._read(stream)

    async def _read(self, stream: Any) -> None:
        last = 0.0
        async for _ in stream:
            now = time.perf_counter()
            if last and self._gaps is not None:
                self._gaps.append(1000 * (now - last))
            last = now
            if self._is_over:
                return

    async def compare(
        self, doings: Sequence[tuple[str, Doing]], *, seconds: float, rounds: int, tries: int = 1, pause: float = 0.0
    ) -> Turns:
        """Rounds of turns until enough of each kind were quiet, or `tries` times as many; the quietest are kept.

        `pause`: seconds after each disturbance, for what it has left behind.
        """
        streams = [asyncio.create_task(self._stream(seed)) for seed in range(self._num_streams)]
        await asyncio.sleep(WARM_SECONDS)
        await doings[0][1](seconds)  # once, so that what starts late has started
        wanted = Counter(kind for kind, _ in doings for _ in range(rounds))
        for number in range(1, tries * rounds + 1):
            await self._round(doings, seconds, pause)
            said = (f"{kind} {turns[-1].change:+.1f} %" for kind, turns in self.turns.items())
            taken = max(turns[-1].taken for turns in self.turns.values())
            print(f"round {number}: {', '.join(said)}; the host took {100 * taken:.1f} %", flush=True)
            if all(len(self._quietest(kind, count, QUIET)) == count for kind, count in wanted.items()):
                break
        self._is_over = True
        await asyncio.gather(*streams)
        return {kind: self._quietest(kind, count) for kind, count in wanted.items()}

    def _quietest(self, kind: str, count: int, most: float = math.inf) -> list[Turn]:
        """So many turns at most, of those in which the host took at most so much."""
        return sorted((t for t in self.turns[kind] if t.taken <= most), key=lambda turn: turn.taken)[:count]

    async def _round(self, doings: Sequence[tuple[str, Doing]], seconds: float, pause: float) -> None:
        before, taken_before, _ = await self._measured(rest(seconds))
        for kind, doing in doings:
            during, taken, came = await self._measured(doing(seconds))
            await asyncio.sleep(pause)
            after, taken_after, _ = await self._measured(rest(seconds))
            turn = Turn(before, during, after, came, max(taken_before, taken, taken_after))
            self.turns.setdefault(kind, []).append(turn)
            before, taken_before = after, taken_after

    async def _measured(self, doing: Awaitable[AttackOutcome]) -> tuple[list[float], float, AttackOutcome]:
        """The gaps, the share that the host took meanwhile, and what came of what was done."""
        await asyncio.sleep(SETTLING_SECONDS)
        gaps, host = list[float](), Host()
        self._gaps = gaps
        came = await doing
        self._gaps = None
        return gaps, host.taken(), came


def run_disturbed(
    parser: argparse.ArgumentParser,
    measure: Callable[[Settings, argparse.Namespace, BusyStreams], Awaitable[list[Result]]],
    title: str,
    http_port: int = -1,
) -> int:
    """The program around it: a private deployment with the bundled model and room for `--streams`."""
    args = parser.parse_args()
    settings = Settings.of(model=str(MODEL), max_num_seqs=args.streams + 8)

    async def work(running: Settings) -> int:
        async with Client(f"{running.gateway.host}:{running.gateway.port}") as client:
            lines = await measure(running, args, BusyStreams(client, args.streams))
        return finish(lines, check=args.check, title=title)

    with awake():
        return with_private_deployment(settings, lambda running: asyncio.run(work(running)), http_port=http_port)
