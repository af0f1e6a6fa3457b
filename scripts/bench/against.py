"""A bench of this checkout and of another version's at once, and their figures beside each other.

    scripts/bench_against CHECKOUT [--rounds 3] [--figures TEXT ...] [--check] -- BENCH [OPTION ...]
    scripts/bench_against ../before --figures "tokens per second" --check -- bench_streams --idle-seconds 0

BENCH is the name of an executable in `scripts/` that prints a table last.  Both versions run it at the same time, in
slices of a quarter of a second in which all processes of one are stopped: so both have the same good and bad seconds
of a machine whose speed drifts by more than they differ.  A rate in seconds of the wall is therefore about half of what
the bench says alone, and a wait is longer; the ratio is what counts.  Above 1 this checkout is better: more of a rate
(a unit with `/s`), less of anything else.  With `--check` the status is 1 where a figure whose name has one of the
`--figures` in it is below 0.97, or is missing.  CHECKOUT needs an environment of its own (`scripts/setup dev`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from scripts.bench.common.deployment import signal_all
from scripts.bench.common.proc import load_average, processor, tree
from scripts.bench.common.report import COLUMNS, Result, bench_parser, figure, finish
from scripts.bench.common.turns import rotated, say, today

HERE = Path(__file__).parents[2]
SLICE_SECONDS = 0.25
TARGET = 0.97
ROW = re.compile(r"(\S.*?)\s{2,}(-?[\d,]*\.?\d+)(?: (\S+))?(?:\s{2,}.*)?")


class Figure(NamedTuple):
    value: float
    unit: str


class BenchFailed(Exception):
    """A bench that printed no table, with the end of what it said."""


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--figures", nargs="+", default=[], metavar="TEXT", help=f"those of at least {TARGET}")
    parser.add_argument(
        "bench", nargs="+", metavar="BENCH", help="an executable in scripts/, behind --, and its options"
    )
    args = parser.parse_args()
    checkouts = [HERE, args.checkout.resolve()]
    for checkout in checkouts:
        for needed in (checkout / "scripts" / args.bench[0], checkout / ".venv" / "bin" / "python"):
            if not needed.exists():
                parser.error(f"{needed} is not there")
    say(f"{today()}, {processor()}, load {load_average():.2f}")
    rounds: list[dict[Path, dict[str, Figure]]] = []
    for number in range(args.rounds):
        order = rotated(checkouts, number)
        try:
            rounds.append(dict(zip(order, run_in_slices([(one, args.bench) for one in order]), strict=True)))
        except BenchFailed as error:
            say(f"round {number + 1}: {error}")
            return 1
        for line in ratios([rounds[-1]], checkouts, args.figures):
            say(f"  round {number + 1} {line.what}: {line.cells[1]}, {line.note}")
    title = f"{' '.join(args.bench)}: this checkout / the other, medians of {args.rounds} rounds"
    return finish(ratios(rounds, checkouts, args.figures), check=args.check, title=title)


def run_in_slices(
    commands: Sequence[tuple[Path, Sequence[str]]], slice_seconds: float = SLICE_SECONDS
) -> list[dict[str, Figure]]:
    """Run an executable of `scripts/` of each checkout, all at once; the figures of each one's table.

    Raises BenchFailed.  All processes are awake, or gone, at the end.
    """
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-against-")))
        children = [_started(checkout, words, logs / str(index)) for index, (checkout, words) in enumerate(commands)]
        stack.callback(_end, children)
        while any(child.poll() is None for child in children):
            for child in children:
                if child.poll() is None:
                    _slice(child, [other for other in children if other is not child], slice_seconds)
        return [_figures_of(checkout, logs / str(index) / "log") for index, (checkout, _) in enumerate(commands)]


def _started(checkout: Path, words: Sequence[str], place: Path) -> subprocess.Popen[bytes]:
    place.mkdir()
    name, *options = words
    environment = os.environ | {"XDG_RUNTIME_DIR": str(place)}  # sockets of its own
    with (place / "log").open("wb") as log:
        return subprocess.Popen(
            [checkout / "scripts" / name, *options], cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def _slice(child: subprocess.Popen[bytes], others: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Let the processes of one run for so long, or until it ends; those that it started meanwhile are among them."""
    for other in others:
        if other.poll() is None:
            signal_all(tree(other.pid), signal.SIGSTOP)
    signal_all(tree(child.pid), signal.SIGCONT)
    begun = time.monotonic()
    while child.poll() is None and (left := seconds - (time.monotonic() - begun)) > 0:
        time.sleep(min(left, 0.05))


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            pids = tree(child.pid)
            signal_all(pids, signal.SIGCONT)
            signal_all(pids, signal.SIGTERM)
            child.wait()


def _figures_of(checkout: Path, log: Path) -> dict[str, Figure]:
    text = log.read_text(encoding="utf-8", errors="replace")
    found = read_table(text)
    if not found:
        raise BenchFailed(f"{checkout} printed no table: {' | '.join(text.splitlines()[-3:])}")
    return found


def read_table(text: str) -> dict[str, Figure]:
    """The figures of the last table that a bench printed, by their names."""
    lines = text.splitlines()
    heads = [index for index, line in enumerate(lines) if line.split()[: len(COLUMNS)] == list(COLUMNS)]
    rows = (ROW.fullmatch(line.rstrip()) for line in lines[heads[-1] + 1 :]) if heads else ()
    return {row[1]: Figure(float(row[2].replace(",", "")), row[3] or "") for row in rows if row}


def ratios(
    rounds: Sequence[Mapping[Path, Mapping[str, Figure]]], checkouts: Sequence[Path], targets: Sequence[str]
) -> list[Result]:
    """How much better the first checkout is than the second, by figure; a target without any figure is missed."""
    found: dict[str, list[tuple[Figure, Figure]]] = defaultdict(list)
    for one in rounds:
        own, other = (one[checkout] for checkout in checkouts)
        for what in own.keys() & other.keys():
            found[what].append((own[what], other[what]))
    lines = [Result(text, None, "x", at_least=TARGET) for text in targets if not any(text in what for what in found)]
    for what in sorted(found, key=list(rounds[0][checkouts[0]]).index):
        each = [ratio for own, other in found[what] if (ratio := better(own, other)) is not None]
        own_value, other_value = (median(pair[side].value for pair in found[what]) for side in (0, 1))
        note = f"{figure(own_value)} against {figure(other_value)} {found[what][0][0].unit}".rstrip()
        bound = TARGET if any(text in what for text in targets) else None
        lines.append(Result(what, median(each) if each else None, "x", at_least=bound, note=note))
    return lines


def better(own: Figure, other: Figure) -> float | None:
    """None where a figure of zero, or below it, leaves nothing to compare."""
    if own.value <= 0 or other.value <= 0:
        return None
    return own.value / other.value if "/s" in own.unit else other.value / own.value
