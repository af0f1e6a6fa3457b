"""What drafts are worth: no speculation, fixed numbers of draft tokens and the adaptive number, in turns in one run.

    scripts/bench_speculation [--pair bundled|made|both] [--kinds model,ngram,eagle] [--plot FILE] [--check]

All through the real chain: `pageant serve` and gRPC clients on the same cores, one deployment for each arm, which is
stopped by signal while another plays.  Each of the concurrent streams sends one request after the other; greedy, an end
token is ignored, all arms are asked the same, and whether they answer the same is checked too.

`bundled` is the model of this repository, with its draft, prompt lookup or its draft head (`--kinds`).  `made` is a
pair of random weights (`--cache DIR` keeps its gigabyte): a target of half a billion parameters and a draft that agrees
with it at `--rate` by construction.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.common.proc import load_average, processor
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.common.turns import say, today
from scripts.bench.speculation.arms import KINDS, MODEL, Pair, arms_of, bundled, made
from scripts.bench.speculation.checkpoint import ensure_pair
from scripts.bench.speculation.contest import Work, contest
from scripts.bench.speculation.figures import (
    LEGEND,
    MADE_WORTH,
    head_lines,
    lone_lines,
    never_worse_lines,
    of_kind,
    rows_of,
    same_tokens_line,
)
from scripts.bench.speculation.plot import draw
from services.cli.display.tables import aligned

BOTH, BUNDLED, MADE = "both", "bundled", "made"


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through every `finally`
    say(f"{today()}, {processor()}, load {load_average():.2f}")
    lines, documents = [], []
    if args.pair in (BUNDLED, BOTH):
        work = Work(args.requests, args.tokens, args.rounds, args.learning)
        found, document = measure(bundled(), args, work, args.streams, args.fixed, kinds=args.kinds)
        lines += found
        documents.append(document)
    if args.pair in (MADE, BOTH):
        say(f"  making, or finding, the pair in {args.cache}")
        pair = made(ensure_pair(args.cache, rate=args.rate))
        work = Work(args.made_requests, args.made_tokens, args.made_rounds, args.made_requests)
        found, document = measure(pair, args, work, args.made_streams, args.made_fixed, at_least=MADE_WORTH)
        lines += found
        documents.append(document)
    print("\n\n".join(documents))
    return finish(lines, check=args.check, title="speculation, medians of one run")


def measure(
    pair: Pair,
    args: argparse.Namespace,
    work: Work,
    streams: list[int],
    lengths: list[int],
    at_least: float | None = None,
    kinds: Sequence[str] = (MODEL,),
) -> tuple[list[Result], str]:
    """One pair: its lines for the last table, and the table of its speeds, of each kind of drafts."""
    with contest(pair, arms_of(kinds, lengths), work) as played:
        for num_streams in streams:
            played.play(num_streams)
    title = f"{work.num_rounds} rounds of {work.num_requests} x {work.num_tokens} tokens a stream"
    lines, tables = head_lines(played.records, pair.name), []
    for kind in kinds:
        records, name = of_kind(played.records, kind), pair.name if kind == MODEL else f"{pair.name}, {kind}"
        lines += lone_lines(records, name, at_least) if 1 in streams else []
        lines += never_worse_lines(records, name)
        head, *rows = rows_of(records)
        tables.append("\n".join([f"{name}, {title}; {today()}, {processor()}", aligned(head, rows, left=())]))
    lines.append(same_tokens_line(played.records, pair.name))
    if args.plot is not None:
        args.plot.write_text(draw(played.records, f"{pair.name} pair, {title}; {processor()}"), encoding="utf-8")
    return lines, "\n\n".join([*tables, LEGEND])


def arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--pair", choices=[BUNDLED, MADE, BOTH], default=BUNDLED)
    parser.add_argument("--streams", type=numbers, default=[1, 2, 4, 8, 16, 32], help="concurrent, of the bundled pair")
    parser.add_argument("--fixed", type=numbers, default=[1, 2, 4, 8], help="numbers of draft tokens that are arms")
    parser.add_argument(
        "--kinds", type=kinds, default=[MODEL], help="of drafts, of the bundled pair: model,ngram,eagle"
    )
    parser.add_argument("--plot", type=Path, help="an SVG file for one picture of all arms")
    parser.add_argument("--made-streams", type=numbers, default=[1], help="the same of the made pair, as the next 3")
    parser.add_argument("--made-fixed", type=numbers, default=[2, 4])
    parser.add_argument("--made-requests", type=int, default=4)
    parser.add_argument("--made-tokens", type=int, default=128)
    parser.add_argument("--made-rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3, help="of each stream, one after the other, in one run")
    parser.add_argument("--learning", type=int, default=8, help="the same before the first run, which do not count")
    parser.add_argument("--tokens", type=int, default=200, help="of each request")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rate", type=float, default=0.8, help="at which the made draft is right")
    default = Path(tempfile.gettempdir()) / "pageant-made-pair"
    parser.add_argument("--cache", type=Path, default=default, help="where the made pair is kept")
    return parser.parse_args()


def kinds(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(KINDS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(KINDS)}")
    return chosen


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]
