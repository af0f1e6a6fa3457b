"""The device's own timeline of steady decode steps, as torch's profiler records it in a worker of a real deployment.

A step's model begins with the kernel that gathers its inputs, and ends with the one that chooses its tokens.  All that
lies between the end of one and the beginning of the next counts as gap: waiting, and also what the device is told in
between, its copies and the changes of the rows.

    python -m scripts.bench.gpu.timeline TRACE ROWS

is that worker: TRACE is written after NUM_STEPS decodes of at least ROWS rows each, which WARM others have gone before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from engine.execution.outputs.pending_result import PendingResult
from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from shared.config import Settings
from shared.messages import StepPlan

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the profiler's events
WARM, NUM_STEPS = 32, 64
FIRST, LAST = "gather_inputs", "choose_rows"  # kernels that each step has once


@dataclass(frozen=True, slots=True)
class Event:
    """Microseconds of the profiler's clock."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Of some steps, one after the other."""

    num_steps: int
    step: float  # seconds from one step's beginning to the next's, the median
    gap: float  # of it, before the next one begins
    idle: float  # share of the whole time in which nothing ran on the device, between kernels of a step too


def read_events(path: Path) -> list[Event]:
    """What ran on the device, in order, of a trace in Chrome's format."""
    return events_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def events_of(records: Iterable[Mapping[str, Any]]) -> list[Event]:
    found = (
        Event(one["name"], float(one["ts"]), float(one["ts"]) + float(one["dur"]))
        for one in records
        if one.get("cat") in ON_DEVICE
    )
    return sorted(found, key=lambda event: event.begin)


def measure(events: Sequence[Event]) -> StepTimeline:
    """Raises ValueError where there are not two steps."""
    begins = [event.begin for event in events if FIRST in event.name]
    if len(begins) < 2:
        raise ValueError(f"the timeline has {len(begins)} steps and {len(events)} events")
    steps = list(pairwise(begins))
    gaps = [after - _end_of(events, begin, after) for begin, after in steps]
    whole = begins[-1] - begins[0]
    busy = _busy([event for event in events if begins[0] <= event.begin < begins[-1]], begins[-1])
    return StepTimeline(
        num_steps=len(steps),
        step=median(after - begin for begin, after in steps) / 1e6,
        gap=median(gaps) / 1e6,
        idle=1 - busy / whole,
    )


def _end_of(events: Sequence[Event], begin: float, after: float) -> float:
    """Of the step that begins there."""
    ends = [event.end for event in events if LAST in event.name and begin <= event.begin < after]
    if not ends:
        raise ValueError(f"no {LAST} in the step that begins at {begin}")
    return max(ends)


def _busy(events: Sequence[Event], limit: float) -> float:
    """Microseconds in which at least one of them runs."""
    total, reached = 0.0, float("-inf")
    for event in events:
        end = min(event.end, limit)
        total += max(0.0, end - max(event.begin, reached))
        reached = max(reached, end)
    return total


def record_timeline(directory: Path, kept: Path, *, device: str, num_seqs: int, context: int, num_output: int) -> Path:
    """Starts a deployment, gives it `num_seqs` streams over gRPC, and keeps its worker's trace at `kept`."""
    from scripts.bench.common.deployment import with_worker
    from scripts.bench.gpu.others import load_options

    settings: dict[str, Any] = {
        "model": str(directory), "load_format": "dummy", "device": device, "max_num_seqs": num_seqs,
        "max_model_len": 2 * (context + num_output), "kernels": "torch",
    }  # fmt: skip
    kept.unlink(missing_ok=True)
    with with_worker(["-m", __name__, str(kept), str(num_seqs)], **settings) as running:
        command = [sys.executable, "-m", "services.cli", "bench", "serve", "--address", running.address]
        load = load_options(num_seqs, context, num_output)
        subprocess.run([*command, *load, "--max-concurrency", str(num_seqs)], check=True, timeout=400)
        running.check()
    if not kept.exists():
        raise RuntimeError(f"the worker had no {num_seqs} steady rows for long enough to record them")
    return kept


# -- in the worker


class TimelineRunner:
    """A model runner, with the profiler about some of its steps; what it records costs the steps between no wait."""

    def __init__(self, runner: ModelRunner, trace: Path, num_rows: int) -> None:
        self._runner, self._trace, self._num_rows = runner, trace, num_rows
        self._num_steady = 0
        self._profile: Any = None

    def __getattr__(self, name: str) -> Any:
        """Everything else is the runner's own."""
        return getattr(self._runner, name)

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
    """A worker that records once its steps are steady, and then goes on as any other."""
    from services.worker import main as worker
    from shared.actor import run_actor

    trace, num_rows = Path(sys.argv[1]), int(sys.argv[2])

    def load(settings: Settings, **options: Any) -> Any:
        return TimelineRunner(load_runner(settings, **options), trace, num_rows)

    with patch.object(worker, "load_runner", load):  # what `worker.make` loads with
        return run_actor(worker.make)


if __name__ == "__main__":
    sys.exit(main())
