"""What misuse of the gateway's doors costs others: `scripts/bench_doors [--check] [--seconds 6] [--rounds 3]`

A whole deployment of real processes with the bundled model.  `--streams` streams generate all the time.  Compared are
the times between their tokens, undisturbed and while a client in another process

- sends megabytes that are refused, as fast as it can, over HTTP and over gRPC;
- has 4 MB of text tokenized, four at a time;
- begins 30 bodies of 31 MB and never sends the last byte.

Each phase in which something is done lies between two undisturbed ones (`scripts/bench/common/disturbance.py`).
Processors are kept from halting (`scripts/bench/common/host.py`).
"""

from __future__ import annotations

import argparse
from functools import partial

from scripts.bench.common.disturbance import (
    BusyStreams,
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

MAX_CHANGE = 10.0  # percent of the p99 between tokens


async def measure(settings: Settings, args: argparse.Namespace, streams: BusyStreams) -> list[Result]:
    grpc, http = (f"{settings.gateway.host}:{port}" for port in (settings.gateway.port, settings.gateway.http_port))
    async with attacker("scripts.bench.misuse.attacker", "--grpc", grpc, "--http", http) as hostile:
        doings = [(kind, partial(hostile.attack, kind)) for kind in hostile.kinds]
        return lines(await streams.compare(doings, seconds=args.seconds, rounds=args.rounds, pause=args.pause))


def lines(turns: Turns) -> list[Result]:
    found = quiet_lines([turn for each in turns.values() for turn in each])
    for kind, each in turns.items():
        p99 = percentile(disturbed(each), 99)
        found.append(Result(f"{kind}: p99", p99, "ms", note=shown(endings(each))))
        found.append(change_line(f"{kind}: change of the p99", each, MAX_CHANGE))
    return found


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3, help="of one phase of each attack")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds after an attack, for what it has left behind")
    parser.add_argument("--streams", type=int, default=16)
    return run_disturbed(parser, measure, "Doors", http_port=0)
