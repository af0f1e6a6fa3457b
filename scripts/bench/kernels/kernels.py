"""Where a step of the native kernels spends its time, beside what this processor can do at most.

    scripts/bench_kernels [--model DIR] [--dtype bfloat16] [--quantization none] [--threads 2] [--rounds 5]
                          [--steps 1@192 32@192 304 2048] [--linear 2048 8192] [--against LIBRARY.so]

A step is ROWS@CONTEXT, a decoding one of so many sequences with the head's product, or the length of a prompt.  Each
line has the best of the rounds, and what part of the team's cycles went into each phase, counted in rounds of their
own.  `--linear`: instead, one linear of so many input and output features in every format of weights.  `--against`:
instead, each step in turns with another build of the kernels, whose path `python -m kernels.cpu.binding.build` prints
in another checkout.  Peaks are loops of one instruction on registers, and of reads of memory that no cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from unittest import mock

import numpy as np
import structlog
import torch

from engine.description.spec import ModelSpec
from engine.loading.load import load_model
from engine.modeling.batch import StepBatch
from engine.modeling.native.decoder import NativeDecoder
from kernels.cpu.binding.loading import load_file
from kernels.cpu.binding.native import Native
from scripts.bench.common.report import bench_parser
from scripts.bench.kernels.kernel_linears import HEADER, linear_lines
from services.cli.display.tables import aligned
from shared.config import Settings

MODEL = "models/pageant-stories"
BLOCK_SIZE, NUM_BLOCKS = 16, 1200
PEAKS = ("float32", "bfloat16 vectors", "int8 vectors", "bfloat16 tiles", "int8 tiles")  # PgPeak
OPERATIONS = 4e10  # of each peak
READ_BYTES = 1 << 28
TURNS = 60


@dataclass(frozen=True)
class MeasuredSteps:
    """`context` 0: a prompt of so many rows; else so many sequences decode, with so many tokens before."""

    rows: int
    context: int

    @classmethod
    def of(cls, text: str) -> MeasuredSteps:
        rows, _, context = text.partition("@")
        return cls(int(rows), int(context or 0))

    def __str__(self) -> str:
        return f"decode of {self.rows} at {self.context}" if self.context else f"prompt of {self.rows}"

    def batch(self, vocab_size: int) -> StepBatch:
        """Random tokens in scattered blocks; those of more tokens than there are blocks share some."""
        random = np.random.default_rng(0)
        num_seqs, scheduled = (self.rows, 1) if self.context else (1, self.rows)
        per_sequence = -(-(self.context + scheduled) // BLOCK_SIZE)
        places = random.permutation(NUM_BLOCKS)
        tables = places[np.arange(num_seqs * per_sequence) % NUM_BLOCKS].reshape(num_seqs, per_sequence)
        tokens = random.integers(0, vocab_size, (num_seqs, per_sequence * BLOCK_SIZE))
        each = partial(np.full, num_seqs, dtype=np.int64)
        return StepBatch(
            rows=np.arange(num_seqs),
            computed=each(self.context),
            scheduled=each(scheduled),
            wanted=each(1),
            tokens=torch.from_numpy(tokens),
            block_tables=tables.astype(np.int64),
            block_size=BLOCK_SIZE,
        )


def linear_operations(spec: ModelSpec, model: NativeDecoder, steps: MeasuredSteps) -> float:
    """Of the linears of dense layers; of a prompt's last layer all rows are counted, though one goes on."""
    weights = sum(weight.n * weight.k for weight in model.dense_linears())
    return 2.0 * steps.rows * (weights + (spec.vocab_size * spec.hidden_size if steps.context else 0))


def attention_operations(spec: ModelSpec, steps: MeasuredSteps) -> float:
    """What queries see, without windows."""
    seen = steps.rows * (steps.context + 1) if steps.context else steps.rows * (steps.rows + 1) / 2
    return sum(4.0 * seen * heads.num_heads * heads.head_dim for heads in spec.attentions)


def run(model: NativeDecoder, steps: MeasuredSteps, batch: StepBatch) -> None:
    hidden = model.forward(batch)
    if steps.context:
        model.greedy(hidden)


def best_of(num_rounds: int, work: Callable[[], object]) -> float:
    """Seconds."""
    times = []
    for _ in range(num_rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def peaks(native: Native, num_rounds: int) -> dict[str, float]:
    """Operations per second of all threads together; without those that this processor lacks."""
    found = {}
    for kind, name in enumerate(PEAKS):
        if per_round := native.spin(kind, 1):
            rounds = max(1, int(OPERATIONS / per_round))
            found[name] = rounds * per_round / best_of(num_rounds, partial(native.spin, kind, rounds))
    return found


def read_ceiling(native: Native, num_rounds: int) -> float:
    """Bytes per second."""
    memory = torch.ones(READ_BYTES, dtype=torch.uint8)
    return READ_BYTES / best_of(num_rounds, partial(native.read, memory))


def of_floor(model: NativeDecoder, native: Native, steps: MeasuredSteps, turns: int) -> str:
    """A decoding step of one row against reading as many bytes as it reads, in turns: memory's speed drifts."""
    cache = steps.context * sum(model.layer_bytes(BLOCK_SIZE)) / BLOCK_SIZE
    weights = sum(linear.packed.nbytes for linear in (*model.dense_linears(), model.head))
    memory = torch.ones(int(weights + cache), dtype=torch.uint8)
    batch = steps.batch(model.spec.vocab_size)
    both = partial(native.read, memory), partial(run, model, steps, batch)
    times = [(best_of(1, both[0]), best_of(1, both[1])) for _ in range(turns)]
    shares, reads = [read / step for read, step in times], [memory.nbytes / read for read, _ in times]
    return (
        f"{steps}: {median(shares):.2f} of the memory floor (quartiles {quantiles(shares)[0]:.2f} and "
        f"{quantiles(shares)[2]:.2f}), {memory.nbytes / 1e6:.0f} MB read at {median(reads) / 1e9:.1f} GB/s in turns"
    )


def lines(
    model: NativeDecoder, native: Native, all_steps: Sequence[MeasuredSteps], rounds: int
) -> list[tuple[str, ...]]:
    """A line of each step: milliseconds, TFLOP/s of linears and attention, percent of each phase."""
    found = []
    for steps in all_steps:
        batch = steps.batch(model.spec.vocab_size)
        run(model, steps, batch)
        best = best_of(rounds, partial(run, model, steps, batch))
        with native.counting() as cycles:
            for _ in range(rounds):
                run(model, steps, batch)
        whole = sum(cycles.values())
        shares = {phase: cycles[phase] / whole for phase in cycles}
        attended = shares["scores"] + shares["softmax"] + shares["mixing"] + shares["attention's rest"]
        rates = (
            linear_operations(model.spec, model, steps) / (best * shares["linears"]),
            attention_operations(model.spec, steps) / (best * attended),
        )
        found.append(
            (
                str(steps),
                f"{1e3 * best:.1f}",
                *(f"{rate / 1e12:.2f}" for rate in rates),
                *(f"{100 * share:.1f}" for share in shares.values()),
            )
        )
    return found


def turns(
    ours: NativeDecoder, other: NativeDecoder, all_steps: Sequence[MeasuredSteps], rounds: int
) -> list[tuple[str, ...]]:
    """A line of each step: the best milliseconds of the other build and of ours, each round of both, and the ratio."""
    found: list[tuple[str, ...]] = []
    for steps in all_steps:
        batch = steps.batch(ours.spec.vocab_size)
        best = [float("inf")] * 2
        for turn in range(-1, rounds):  # the first warms up
            for which, model in ((0, other), (1, ours)) if turn % 2 else ((1, ours), (0, other)):
                seconds = best_of(1, partial(run, model, steps, batch))
                best[which] = min(best[which], seconds) if turn >= 0 else best[which]
        found.append((str(steps), f"{1e3 * best[0]:.2f}", f"{1e3 * best[1]:.2f}", f"{best[0] / best[1]:.2f}"))
    return found


def with_library(path: Path, settings: Settings) -> NativeDecoder:
    """The model as another build of the kernels computes it."""
    with mock.patch("engine.loading.backend.load_native", return_value=load_file(path)):
        model = load_model(settings).model
    assert isinstance(model, NativeDecoder)
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, has_check=False)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps",
        nargs="+",
        type=MeasuredSteps.of,
        default=[MeasuredSteps(1, 192), MeasuredSteps(32, 192), MeasuredSteps(304, 0), MeasuredSteps(2048, 0)],
    )
    parser.add_argument("--linear", nargs=2, type=int, metavar=("IN", "OUT"))
    parser.add_argument("--against", type=Path, metavar="LIBRARY")
    given = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    torch.set_num_threads(1)
    settings = Settings.of(
        model=given.model,
        kernels="native",
        dtype=given.dtype,
        quantization=given.quantization,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=max(steps.rows if steps.context else 1 for steps in given.steps),
    )
    model = load_model(settings).model
    assert isinstance(model, NativeDecoder)  # kernels="native" makes no other
    native = model.layout.native
    native.set_threads(given.threads, pin=False)
    ceiling, most = read_ceiling(native, given.rounds), peaks(native, given.rounds)
    print(
        f"read ceiling {ceiling / 1e9:.1f} GB/s; peaks in TFLOP/s: "
        + ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in most.items())
    )
    if given.linear:
        print(aligned(HEADER, linear_lines(native, given.linear[0], given.linear[1], given.rounds), left=(0,)))
        return 0
    if given.against:
        other = with_library(given.against, settings)
        other.layout.native.set_threads(given.threads, pin=False)
        against = ("step", "other, ms", "ours, ms", "ratio")
        print(aligned(against, turns(model, other, given.steps, given.rounds), left=(0,)))
        return 0
    with native.counting() as phases:
        pass
    header = ("step", "ms", "linears, TFLOP/s", "attention, TFLOP/s", *(f"{phase}, %" for phase in phases))
    print(aligned(header, lines(model, native, given.steps, given.rounds), left=(0,)))
    for steps in given.steps:
        if steps.rows == 1 and steps.context:
            print(of_floor(model, native, steps, TURNS))
    return 0
