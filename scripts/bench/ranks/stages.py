"""What a pipeline gives: tokens of many streams beside those of one worker with as many threads, and its bubbles.

Both are there all the time, and rounds of them take turns.  The pipeline has the next plan while it computes one, as a
worker has it from the scheduler.  A bubble is the share of the time in which a stage does not compute its layers; that
of the last one, which samples too, is what it waits for the others.  A step in parts reads all weights once for each:
what one worker gives that divides its steps as a pipeline does, a pipeline without bubbles would give.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

from engine.execution.runner import ModelRunner
from engine.modeling.ranks.stages import StagedDecoder
from kernels.cpu.binding.native import Native
from scripts.bench.common.report import Result
from scripts.bench.kernels.decoded_rows import DecodedRows, beside
from services.worker.groups.ranks import StagesOfRanks, WatchedRanks
from services.worker.plans.pipelined import PipelinedComputation
from services.worker.plans.plan_parts import PlanDivider
from shared.messages import StepPlan, StepResult

LEAST = 0.85  # of the tokens that one worker gives
IN_FLIGHT = 2  # plans, as of the scheduler


class Pipeline:
    """A group's steps, as the step thread of a worker makes them."""

    def __init__(self, runner: ModelRunner, num_stages: int) -> None:
        self._steps = PipelinedComputation(runner, num_stages)

    def run(self, plans: list[StepPlan]) -> list[StepResult]:
        """Of which no one needs another one's result."""
        left, results, in_flight = list(reversed(plans)), list[StepResult](), 0
        while left or not self._steps.is_idle:
            while left and in_flight < IN_FLIGHT:
                self._steps.apply(left.pop())
                in_flight += 1
            found = [one for one in self._steps.turn() if isinstance(one, StepResult)]
            in_flight -= len(found)
            results += found
        return results


def measure_stages(
    native: Native,
    alone: ModelRunner,
    runner: ModelRunner,
    group: WatchedRanks | StagesOfRanks,
    rows: int,
    rounds: int,
    steps: int,
) -> list[Result]:
    """Raises RuntimeError where the two say different tokens."""
    model, stages = group.model, group.place.ranks
    assert isinstance(model, StagedDecoder)
    threads = partial(native.set_threads, pin=False)
    one = DecodedRows(alone, rows, 2 * rounds * steps, partial(threads, stages))
    both = DecodedRows(runner, rows, 2 * rounds * steps, partial(threads, 1), Pipeline(runner, stages).run)
    divider, ratios, ceilings, times, bubbles = PlanDivider(stages), [], [], [], []

    def in_parts(plans: list[StepPlan]) -> list[StepResult]:
        return [alone.run(part.plan) for plan in plans for part in divider.divide(plan)]

    for _ in range(rounds):
        seconds, wanted = one.steps(steps)
        busy, waited, begun = list(model.seconds), model.waited, time.perf_counter()
        staged, tokens = both.steps(steps)
        took = time.perf_counter() - begun
        idle = [1 - (after - before) / took for before, after in zip(busy, model.seconds, strict=True)]
        bubbles.append([*idle, (model.waited - waited) / took])
        if tokens != wanted:
            raise RuntimeError(f"{stages} stages say other tokens than one worker at {rows} rows")
        divided, more = one.steps(steps, run=in_parts)
        if both.steps(steps)[1] != more:
            raise RuntimeError(f"parts of steps say other tokens than {stages} stages at {rows} rows")
        ratios.append(seconds / staged)
        ceilings.append(seconds / divided)
        times.append((seconds, staged))
    what = f"tokens of {stages} stages, {rows} streams"
    found = [Result(what, median(ratios), "x", at_least=LEAST, note=beside(times))]
    found.append(Result(f"the same of one worker that divides its steps into {stages}", median(ceilings), "x"))
    for stage, shares in enumerate(zip(*bubbles, strict=True)):
        found.append(Result(f"bubbles of stage {stage}, {rows} streams", 100 * median(shares), "%"))
    return found
