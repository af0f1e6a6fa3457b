"""What hostile grammars cost other clients: `scripts/bench_structured [--check] [--seconds 6]`

A whole deployment of real processes with the bundled model.  `--streams` streams generate all the time.  Compared are
the times between their tokens: undisturbed; while hostile grammars arrive, one after another, each unlike all before;
while as many harmless formats arrive; while as many requests without a format do; and beside a process that only
counts, with the priority that compilers have.  The last three say what any work costs on the machine at hand.

Each phase in which something is done lies between two undisturbed ones (`scripts/bench/common/disturbance.py`).  Each
hostile request has to end within two seconds.  Processors are kept from halting (`scripts/bench/common/host.py`), and a
phase in which, or beside which, the host took more than 2 % of them does not count, as long as there is another.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from scripts.bench.common.disturbance import (
    AttackOutcome,
    AttackProcess,
    BusyStreams,
    Doing,
    Turns,
    attacker,
    change_line,
    disturbed,
    endings,
    quiet_lines,
    run_disturbed,
    shown,
)
from scripts.bench.common.report import Result, bench_parser
from shared.config import Settings
from shared.metrics import percentile

MAX_CHANGE = 5.0  # percent of the p99 between tokens
MAX_SECONDS = 2.0  # of a hostile request
HOSTILE, HARMLESS, PLAIN = "under attack", "with harmless formats", "with as many plain requests"
BESIDE = "beside a counting process"
ROUND = (HOSTILE, HARMLESS, HOSTILE, PLAIN, HOSTILE, BESIDE)  # what is to be known best comes most often
COUNTING = "from shared.processes.idle_time import take_idle_time_only; take_idle_time_only()\nwhile True: pass"


def doings(process: AttackProcess) -> dict[str, Doing]:
    """Harmless and plain requests are as many as those of the last attack."""
    pace = 1.0  # seconds for each request of the last attack

    async def attack(seconds: float) -> AttackOutcome:
        nonlocal pace
        came = await process.attack("hostile", seconds)
        pace = seconds / max(1, sum(came.endings.values()))
        return came

    return {
        HOSTILE: attack,
        HARMLESS: lambda seconds: process.attack("harmless", seconds, pace),
        PLAIN: lambda seconds: process.attack("plain", seconds, pace),
        BESIDE: count,
    }


async def count(seconds: float) -> AttackOutcome:
    """A process counts, and takes idle time only."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", COUNTING)
    await asyncio.sleep(seconds)
    process.kill()
    await process.wait()
    return AttackOutcome()


async def measure(settings: Settings, args: argparse.Namespace, streams: BusyStreams) -> list[Result]:
    address = f"{settings.gateway.host}:{settings.gateway.port}"
    async with attacker("scripts.bench.misuse.attacker", "--grpc", address) as hostile:
        known = doings(hostile)
        return lines(
            await streams.compare(
                [(kind, known[kind]) for kind in ROUND], seconds=args.seconds, rounds=args.rounds, tries=args.tries
            )
        )


def lines(turns: Turns) -> list[Result]:
    attacks, attacked = turns[HOSTILE], disturbed(turns[HOSTILE])
    taken = 100 * max(turn.taken for each in turns.values() for turn in each)
    slowest, kind = max((slow, kind) for turn in attacks for kind, slow in turn.came.slowest.items())
    served = [slow for turn in turns[HARMLESS] for slow in turn.came.slowest.values()]
    hostile, harmless = endings(attacks), endings(turns[HARMLESS])
    return [
        Result("attacks", len(attacks), note=f"the host took at most {taken:.1f} % of a phase"),
        *quiet_lines(attacks),
        Result("between tokens, p50, under attack", percentile(attacked, 50), "ms", note=f"{len(attacked)} tokens"),
        Result("between tokens, p99, under attack", percentile(attacked, 99), "ms"),
        *(
            change_line(f"change of the p99 {kind}", each, MAX_CHANGE if kind == HOSTILE else None)
            for kind, each in turns.items()
        ),
        Result("slowest hostile request", slowest, "s", at_most=MAX_SECONDS, note=kind),
        Result("slowest harmless request", max(served), "s", note=f"median of phases {percentile(served, 50):.2f} s"),
        Result("harmless requests", harmless.total(), note=f"{harmless['served']} served"),
        Result("hostile requests", hostile.total(), note=shown(hostile)),
    ]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=5, help="of three attacks and one phase of each other kind")
    parser.add_argument("--tries", type=int, default=4, help="times as many rounds, while the host takes much")
    parser.add_argument("--streams", type=int, default=32)
    return run_disturbed(parser, measure, "Hostile grammars")
