"""What a worker writes down is what the simulator is fitted to."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.simulator.fitting import read_recording
from services.worker.main import make_steps
from services.worker.plans.recording import RecordedRunner
from services.worker.plans.steps import StepComputation, ThreadSteps
from shared.config import Settings
from shared.messages import StepPlan, StepResult
from shared.metrics.steps import StepWork
from shared.processes.losses import STEPS, losses
from shared.transport import MemoryTransport


class Runner:
    """Takes ten milliseconds, samples for the last row only."""

    num_resets = 0
    capacity = SimpleNamespace(device="cpu")
    queues = False

    def reset(self) -> None:
        self.num_resets += 1

    def holdings(self) -> tuple[list[int], list[int]]:
        return [0], [1]

    def run(self, plan: StepPlan) -> StepResult:
        time.sleep(0.01)
        return StepResult(plan.epoch, plan.step_id, [0, 1], [7])


def plan() -> StepPlan:
    return StepPlan(1, 1, [], [0, 1], [4, 9], [3, 1], [0, 0], [], [], [])


def test_every_step_leaves_a_line(tmp_path: Path) -> None:
    runner, path = Runner(), tmp_path / "steps.jsonl"
    wrapped = RecordedRunner(runner, path)
    assert wrapped.run(plan()).sampled_token_ids == [7]
    wrapped.run(plan())
    wrapped.reset()
    assert runner.num_resets == 1 and wrapped.holdings() == ([0], [1])
    wrapped.close()
    steps = read_recording(path)
    assert [step.work for step in steps] == [StepWork(4, 2, 1, num_context=17, num_pairs=28)] * 2
    assert all(0.01 <= step.seconds < 1 for step in steps) and steps[1].start > steps[0].start


def test_without_a_file_nothing_is_wrapped() -> None:
    runner = Runner()
    steps = make_steps(cast(Any, runner), MemoryTransport(), Settings(), on_failure=lambda: None)
    steps.close()
    assert isinstance(steps, ThreadSteps) and isinstance(steps._steps, StepComputation)
    assert steps._steps._runner is runner


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RecordedRunner(Runner(), tmp_path / "nowhere" / "steps.jsonl")


def test_a_disk_that_takes_no_line_costs_lines_and_no_step() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    before, wrapped = losses()[STEPS], RecordedRunner(Runner(), full)
    for _ in range(3):
        assert wrapped.run(plan()).sampled_token_ids == [7]
    wrapped.close()
    assert losses()[STEPS] == before + 3
