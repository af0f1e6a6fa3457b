"""Writes down what every step computed and how long it took: what `pageant simulate --recorded` is fitted to."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import msgspec

from services.worker.steps import Runner
from shared.messages import StepPlan, StepResult
from shared.metrics.steps import RecordedStep, work_of_columns


class RecordedRunner:
    """A runner whose steps leave a line each, in a file of this process's own."""

    def __init__(self, runner: Runner, path: Path) -> None:
        self._runner = runner
        self._file = path.open("ab", buffering=0)  # a line of 150 bytes per step, whole even when the process is killed

    def close(self) -> None:
        """Nothing runs after this; a process that ends need not say it."""
        self._file.close()

    def reset(self) -> None:
        self._runner.reset()

    def holdings(self) -> tuple[list[int], list[int]]:
        return self._runner.holdings()

    def run(self, plan: StepPlan) -> StepResult:
        start = perf_counter()
        result = self._runner.run(plan)
        seconds = perf_counter() - start
        work = work_of_columns(plan.num_computed_tokens, plan.num_scheduled_tokens, sum(result.num_sampled))
        line = RecordedStep(**msgspec.structs.asdict(work), start=start, seconds=seconds)
        self._file.write(msgspec.json.encode(line) + b"\n")
        return result


def recorded(runner: Runner, path: str) -> Runner:
    """The runner itself where `path` is empty, else one that writes its steps there."""
    return RecordedRunner(runner, Path(path)) if path else runner
