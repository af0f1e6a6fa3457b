"""The device's own timeline of steady decode steps, as torch's profiler records it in a worker of a real deployment.

A step's model begins with the kernel that gathers its inputs, and ends with the one that chooses its tokens.  All that
lies between the end of one and the beginning of the next counts as gap: waiting, and also what the device is told in
between, its copies and the changes of the rows.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the profiler's events
READY_SECONDS = 300  # of the deployment: weights are made up, graphs captured
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
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        worker = ["-m", "scripts.bench.gpu.timeline_worker", str(trace), str(num_seqs)]
        with with_worker(worker, ready_seconds=READY_SECONDS, **settings) as running:
            command = [sys.executable, "-m", "services.cli", "bench", "serve", "--address", running.address]
            load = load_options(num_seqs, context, num_output)
            subprocess.run([*command, *load, "--max-concurrency", str(num_seqs)], check=True, timeout=400)
            running.check()
        if not trace.exists():
            raise RuntimeError(f"the worker had no {num_seqs} steady rows for long enough to record them")
        shutil.move(trace, kept)
    return kept
