"""What it costs that no row's result depends on the others: steps of the model runner, in turns within one run.

    scripts/bench_invariance [--check] [--rounds 3] [--threads 0]

A model with random weights in the real format: 4 layers, hidden 576, 9 heads on 3, vocabulary 8,192.  Torch's kernels
run with `batch_invariant` true and false; the native ones have no such switch, since one routine sums every row in one
order whatever the number of rows: their price would show as rows that cost more where they do not fill a tile, so the
time of a row among 8, 12 and 32 is printed beside that of a row alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import structlog

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from scripts.bench.common.models import llama, write_config
from scripts.bench.common.plans import PlanMaker
from scripts.bench.common.report import Result, bench_parser, finish
from shared.config import Settings
from shared.errors import ConfigError
from shared.messages import StepPlan

VOCAB = 8192
ROWS = (1, 8, 12, 32)  # that decode
CONTEXT, NUM_STEPS, PREFILL = 64, 6, 512  # tokens, steps per figure
SETUPS: dict[str, dict[str, object]] = {
    "torch, batch_invariant true": {"kernels": "torch", "batch_invariant": True},
    "torch, batch_invariant false": {"kernels": "torch", "batch_invariant": False},
    "native": {"kernels": "native"},
}
TORCH, NATIVE = list(SETUPS)[:2], list(SETUPS)[2:]
Figures = dict[str, list[float]]  # workload -> milliseconds of a step, of each round


class InvarianceSteps:
    """Plans made by hand for one runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._plans = PlanMaker(runner, NUM_STEPS)

    def decode(self, num_rows: int) -> float:
        """Milliseconds of the median step in which so many sequences yield a token each."""
        rows = range(num_rows)
        self._admit(rows, CONTEXT)
        return median(self._run(self._plans.decode(rows, CONTEXT + index)) for index in range(NUM_STEPS))

    def prefill(self) -> float:
        """Milliseconds of a step that computes one prompt."""
        return self._admit([0], PREFILL)

    def _admit(self, rows: Sequence[int], length: int) -> float:
        self._runner.reset()
        return self._run(self._plans.admit(rows, length))

    def _run(self, plan: StepPlan) -> float:
        return 1000 * self._runner.run(plan).device_time


def load(directory: Path, names: Sequence[str], num_threads: int) -> dict[str, InvarianceSteps]:
    """Those of the set-ups that this machine has."""
    found = {}
    shared = Settings.of(
        model=str(directory), load_format="dummy", num_blocks=512, max_num_seqs=64, num_threads=num_threads
    )
    for name in names:
        try:
            found[name] = InvarianceSteps(load_runner(shared.replace(**SETUPS[name]), has_windows=False))
        except ConfigError as error:
            print(f"{name}: left out, {error}", flush=True)
    return found


def measure(setups: dict[str, InvarianceSteps], num_rounds: int) -> dict[str, Figures]:
    """Every round takes each workload to each set-up in turn; the round before the first only warms up."""
    figures: dict[str, Figures] = {name: {} for name in setups}
    for number in range(num_rounds + 1):
        for rows in (*ROWS, 0):
            for name, steps in setups.items():
                taken = steps.decode(rows) if rows else steps.prefill()
                if number:
                    figures[name].setdefault(workload(rows), []).append(taken)
    return figures


def workload(rows: int) -> str:
    return f"decode of {rows}" if rows else f"prefill of {PREFILL}"


def report(figures: dict[str, Figures]) -> list[Result]:
    medians = {name: {what: median(taken) for what, taken in found.items()} for name, found in figures.items()}
    lines = [Result(f"{name}: {what}", ms, "ms") for name, found in medians.items() for what, ms in found.items()]
    exact, loose = (medians[name] for name in TORCH)
    lines += [Result(f"price with torch: {what}", exact[what] / loose[what], "x") for what in exact]
    if native := medians.get("native"):
        one = native[workload(1)]
        for rows in ROWS[1:]:
            share = native[workload(rows)] / rows / one
            lines.append(
                Result(f"native: a row among {rows} / alone", share, "x", note="no switch: nothing to turn off")
            )
    return lines


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of the kernels; 0: one per core")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    with tempfile.TemporaryDirectory() as directory:
        config = llama(576, 1536, 4, (9, 3), VOCAB, max_position_embeddings=1024, tie_word_embeddings=True)
        write_config(Path(directory), config)
        figures: dict[str, Figures] = {}
        for names in (TORCH, NATIVE):  # the native kernels take torch's threads away, so they come after it
            figures |= measure(load(Path(directory), names, args.threads), args.rounds)
    return finish(report(figures), check=args.check, title="independence of the batch: steps of the model runner")
