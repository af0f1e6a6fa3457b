"""Writes down what every step computed and how long it took: what `pageant simulate --recorded` is fitted to."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import msgspec
import structlog

from services.worker.plans.steps import StepRunner
from shared.messages import StepPlan, StepResult
from shared.metrics.steps import RecordedStep, work_of_columns
from shared.processes.losses import STEPS
from shared.processes.sink import Sink
from shared.transport.link import worth_a_line

log = structlog.get_logger()

CLOSE_SECONDS = 5.0


class RecordedRunner:
    """A runner whose steps leave a line each, in a file of this process's own.

    A step that cannot be written is missing there; writing neither delays a step nor ends the worker.
    """

    def __init__(self, runner: StepRunner, path: Path) -> None:
        self._runner = runner
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._sink = Sink(self._file.fileno(), STEPS, self._tell)
        self._num_gaps = 0

    def close(self) -> None:
        """Called at the end of the process: losses need no log line any more."""
        self._sink.drain(CLOSE_SECONDS)
        self._file.close()

    def _tell(self, count: int) -> bytes:
        """In the log: a line here is a step."""
        self._num_gaps += 1
        if worth_a_line(self._num_gaps):
            log.warning("steps_lost", file=str(self._path), num_lost=count)
        return b""

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
        self._sink.write(msgspec.json.encode(line) + b"\n")
        return result
