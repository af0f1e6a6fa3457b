"""Pageant beside other engines, in turn within one run, on one machine.

    scripts/bench_peers --peers DIR [--family dense|moe|gpt2|gemma|all] [--model NAME|both]
                        [--quantization none|int8|int4|both] [--rounds 3] [--workloads a,b1,b2,c,d]
                        [--engines NAME,...] [--slices] [--against CHECKOUT] [--check]

DIR holds the peers, each in an environment of its own; docs/measurements/engines.md says how to install them.  Those
that are not there, or cannot load a model, are named and left out.  Each engine stays up; an idle peer's processes are
stopped while others run.  A family is one or two models of a kind (scripts/bench/common/specs.py).  A run in which
other processes, or the hypervisor, took more than 0.15 cores does not count; further rounds are played then, at most as
many again.

With `--slices` all run at once, in slices of a quarter of a second in which the processes of all but one are stopped:
on a machine whose speed drifts by more than engines differ (scripts/bench/peers/slices.py).  Times to a first token are
not known then, nor the share of the memory floor.

CHECKOUT is another version of this project, on this one's Python, with which this one is compared in the place of peers
(pageant-runner-other, pageant-other), always in slices.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.common import models
from scripts.bench.common.proc import load_average, processor
from scripts.bench.common.report import Result, bench_parser, finish
from scripts.bench.common.specs import FAMILIES, SPECS
from scripts.bench.common.turns import say, today
from scripts.bench.peers.catalog import CHAIN, FULL, INT4, INT8, KV_CACHE_GIB, OTHERS, RUNNER, PeerEngine, engines
from scripts.bench.peers.child import EngineFailed, EngineProcess
from scripts.bench.peers.conversion import ConversionFailed, convert_missing
from scripts.bench.peers.figures import engine_table, floor_line, memory_line, pair_lines, ratio_lines
from scripts.bench.peers.rounds import PeerContest
from scripts.bench.peers.workloads import WORKLOADS

BOTH, ALL = "both", "all"
NUM_BYTES, PASSES = 512 << 20, 6  # far beyond any cache
HOW = f"torch.sum of {NUM_BYTES >> 20} MiB, a thread per core, best of {PASSES}"


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through every `finally`
    logs = Path(tempfile.mkdtemp(prefix="bench-peers-"))
    say(f"{today()}, {processor()}, load {load_average():.2f}; the engines' logs are in {logs}")
    lines: list[Result] = []
    documents = []
    for model in args.models:
        models.ensure(args.peers / "models" / model, model)
        for quantization in [FULL, INT8] if args.quantization == BOTH else [args.quantization]:
            match = Match(args, model, quantization, logs)
            match.play()
            lines += match.lines()
            documents.append(match.document())
    print("\n\n".join(documents))
    return finish(lines, check=args.check, title="Pageant / the best peer that is here, medians of one run")


class Match:
    """One model and quantization: the engines that are installed play all workloads."""

    def __init__(self, args: argparse.Namespace, model: str, quantization: str, logs: Path) -> None:
        self._args = args
        self._model, self._quantization = model, quantization
        self._logs = logs
        self._contest = PeerContest([], SPECS[model]["vocab_size"], args.timeout, args.slices)
        self._versions: dict[str, str] = {}
        self._reports: dict[str, dict[str, Any]] = {}
        self._bandwidths: list[float] = []

    def play(self) -> None:
        def before() -> None:
            self._bandwidths.append(read_bandwidth())

        with ExitStack() as stack:
            for engine in self._entrants():
                self._enter(engine, stack)
            for name in self._args.workloads:
                say(f"{self._model} {self._quantization}: {name}, {WORKLOADS[name].what}")
                if self._args.against:
                    self._contest.play_pairs(WORKLOADS[name], self._args.rounds)
                    continue
                self._contest.play(WORKLOADS[name], self._args.rounds, before if name == "a" else lambda: None)
            ours = (child for child in self._contest.children if child.engine.is_ours)
            self._reports = {child.engine.name: child.report() for child in ours}

    def _entrants(self) -> list[PeerEngine]:
        """The engines that were asked for and are installed."""
        asked = self._args.engines
        known = engines(self._args.peers, self._model, self._quantization, self._args.against)
        if self._args.against:
            known = [engine for engine in known if engine.name in (*OTHERS, *OTHERS.values())]
            asked = asked | {OTHERS.get(name, name) for name in asked}
        wanted = [e for e in known if (e.by_default if not asked else asked & {e.name, e.name.partition("-")[0]})]
        for engine in wanted:
            try:
                convert_missing(self._args.peers, engine)
            except ConversionFailed as error:
                self._contest.remark(str(error))
            else:
                if engine.missing:
                    self._contest.remark(f"not here: {engine.name} (no {engine.missing[0]})")
        return [engine for engine in wanted if not engine.missing]

    def _enter(self, engine: PeerEngine, stack: ExitStack) -> None:
        try:
            child = EngineProcess(engine, self._logs)
        except EngineFailed as error:
            self._contest.remark(str(error))
            return
        stack.callback(child.close)
        say(f"  {engine.name}: {child.version}, loaded in {child.load_seconds:.1f} s")
        self._versions[engine.name] = child.version
        self._contest.children.append(child)

    def lines(self) -> list[Result]:
        """Ratios, then what is measured against the machine itself."""
        records = self._contest.records
        if self._args.against:
            found = pair_lines(records, self._model, self._args.engines or set(OTHERS), self._args.workloads)
        else:
            found = ratio_lines(records, self._model, self._quantization, self._contest.warm_ups)
        if self._bandwidths and not self._args.slices:
            streamed = models.streamed_bytes(self._model, quantization=self._quantization)
            found.append(floor_line(records, self._model, self._quantization, streamed, median(self._bandwidths)))
        weights = models.weight_bytes(self._model, quantization=self._quantization)
        for engine, report in self._reports.items():
            found.append(memory_line(engine, self._model, report["worker_peak_rss"], weights, KV_CACHE_GIB << 30))
        return found

    def document(self) -> str:
        weights = "16-bit weights" if self._quantization == FULL else f"{self._quantization} weights"
        title = f"Model {self._model}, {weights}; {today()}, {processor()}"
        how = f"memory read at {median(self._bandwidths) / 1e9:.1f} GB/s ({HOW})" if self._bandwidths else ""
        return "\n".join([engine_table(self._contest.records, self._versions, title), how, *self._contest.remarks])


def read_bandwidth() -> float:
    """Bytes per second at which this machine reads memory now: the floor under decoding at batch 1."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    floats, times = torch.ones(NUM_BYTES // 4), []
    for _ in range(PASSES):
        begin = time.perf_counter()
        floats.sum()
        times.append(time.perf_counter() - begin)
    return NUM_BYTES / min(times)


def arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="the folder of the peers and of the models")
    parser.add_argument("--family", choices=[*FAMILIES, ALL], help="all models of a kind, in place of --model")
    parser.add_argument("--model", choices=[*SPECS, BOTH], default="S", help="both: S and M")
    parser.add_argument("--quantization", choices=[FULL, INT8, INT4, BOTH], default=FULL)
    parser.add_argument("--workloads", type=_names(WORKLOADS), default=list(WORKLOADS), help="a,b1,b2,c,d")
    parser.add_argument(
        "--engines", type=lambda text: set(text.split(",")), default=set(), help=f"{RUNNER},{CHAIN},..."
    )
    parser.add_argument("--slices", action="store_true", help="all at once, each for a quarter of a second in turn")
    parser.add_argument(
        "--against", type=lambda text: Path(text).resolve(), help="another checkout, in the place of peers"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one run may take")
    args = parser.parse_args()
    args.peers = args.peers.resolve()
    args.models = _models(args.family, args.model)
    return args


def _models(family: str | None, model: str) -> tuple[str, ...]:
    if family == ALL:
        return tuple(SPECS)
    if family is None:
        return FAMILIES["dense"] if model == BOTH else (model,)
    return FAMILIES[family]


def _names(known: dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return names

    return parse
