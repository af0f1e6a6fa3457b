"""What a step of the scheduler's core costs, by the number of sequences that decode.

    scripts/bench_scheduler [--check] [--steps 400] [--sizes 16 64 256 1024]

A step is `schedule`, `apply` and taking the token batches and the notes, two steps in flight as in service; no
messages are encoded and no model runs.  The figure is the median step of a window in which every sequence crosses
several block boundaries, so that allocating, hashing and registering blocks are in it; it is processor time, since
others may share the machine.

What the messages of a step cost is told by `pageant bench messages`.
"""

from __future__ import annotations

import gc
from collections import deque
from statistics import mean, median
from time import thread_time

from scripts.bench.common.report import Result, bench_parser, finish
from services.cli.bench.messages import WORKER, Decoding
from shared.messages import StepPlan

TARGET_SIZE, STEP_US = 64, 300.0
GROWTH = 1.5  # how much a sequence may cost among 1,024 of what it costs among 64: caches, but nothing quadratic


def step_times(num_sequences: int, num_steps: int) -> list[float]:
    """Microseconds of each step, after the prompts are in and the first blocks are full."""
    decoding = Decoding(num_sequences)
    plans: deque[StepPlan] = deque()
    times = []
    gc.collect()
    gc.freeze()
    for number in range(num_steps + 20):
        start = thread_time()
        while plan := decoding.plan():
            plans.append(plan)
        planned = thread_time()
        result = decoding.answer(plans.popleft())
        answered = thread_time()
        decoding.core.apply(WORKER, result)
        decoding.core.outbound.take_batches()
        decoding.core.journal.take()
        if number >= 20:
            times.append(1e6 * (thread_time() - answered + planned - start))
    gc.unfreeze()
    return times


def step_lines(sizes: list[int], num_steps: int) -> list[Result]:
    lines, medians = [], {}
    for size in sizes:
        times = step_times(size, num_steps)
        medians[size] = median(times)
        bound = STEP_US if size == TARGET_SIZE else None
        note = f"mean {mean(times):,.0f} us, {medians[size] / size:.2f} us per sequence"
        lines.append(Result(f"step of {size} sequences", medians[size], "us", at_most=bound, note=note))
    if {TARGET_SIZE, 1024} <= medians.keys():
        growth = (medians[1024] / 1024) / (medians[TARGET_SIZE] / TARGET_SIZE)
        lines.append(Result("cost of a sequence among 1,024 / among 64", growth, "x", at_most=GROWTH))
    return lines


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    args = parser.parse_args()
    lines = step_lines(args.sizes, args.steps)
    return finish(lines, check=args.check, title="scheduler: schedule + apply, two steps in flight")
