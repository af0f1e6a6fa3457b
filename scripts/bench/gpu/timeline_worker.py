"""A worker that records the device's timeline once its steps are steady, and then goes on as any other:

    python -m scripts.bench.gpu.timeline_worker TRACE ROWS

TRACE is written after NUM_STEPS decodes of at least ROWS rows each, which WARM others have gone before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from engine.execution.loading import load_runner
from engine.execution.pending_result import PendingResult
from engine.execution.runner import ModelRunner
from services.worker import main as worker
from shared.actor import run_actor
from shared.config import Settings
from shared.messages import StepPlan

WARM, NUM_STEPS = 32, 64


class TimelineRunner:
    """A model runner, with the profiler about some of its steps; what it records costs the steps between no wait."""

    def __init__(self, runner: ModelRunner, trace: Path, num_rows: int) -> None:
        self.capacity = runner.capacity
        self.reset, self.holdings = runner.reset, runner.holdings
        self._runner, self._trace, self._num_rows = runner, trace, num_rows
        self._num_steady = 0
        self._profile: Any = None

    def run(self, plan: StepPlan) -> Any:
        return self.launch(plan).finish()

    def launch(self, plan: StepPlan) -> PendingResult:
        is_steady = len(plan.rows) >= self._num_rows and all(count == 1 for count in plan.num_scheduled_tokens)
        self._num_steady = self._num_steady + 1 if is_steady else 0
        if self._num_steady == WARM and not self._trace.exists():
            self._begin()
        answer = self._runner.launch(plan)
        if self._num_steady == WARM + NUM_STEPS or not is_steady:
            self._end(answer, is_whole=is_steady)
        return answer

    def _begin(self) -> None:
        on_gpu = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
        self._profile = torch.profiler.profile(activities=[activity])
        self._profile.start()

    def _end(self, answer: PendingResult, *, is_whole: bool) -> None:
        """A recording that was cut short is dropped: the next steady steps are recorded anew."""
        if self._profile is None:
            return
        answer.finish()
        self._profile.stop()
        if is_whole:
            part = self._trace.with_suffix(".part")
            self._profile.export_chrome_trace(str(part))
            part.rename(self._trace)
        self._profile = None


def main() -> int:
    trace, num_rows = Path(sys.argv[1]), int(sys.argv[2])

    def load(settings: Settings) -> Any:
        return TimelineRunner(load_runner(settings), trace, num_rows)

    with patch.object(worker, "load_runner", load):  # what `worker.make` loads with
        return run_actor(worker.make)


if __name__ == "__main__":
    sys.exit(main())
