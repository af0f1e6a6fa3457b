"""How long a worker takes for a step, from what is in it."""

from __future__ import annotations

from typing import Protocol

from services.scheduler.state.step import Step
from services.simulator.hardware import Device
from shared.metrics import ModelWork
from shared.metrics.steps import StepWork, work_of_columns


def work_of(step: Step) -> StepWork:
    """The work of a step that has been planned."""
    return work_of_columns(step.num_computed, step.num_scheduled, sum(step.num_samples))


class StepTime(Protocol):
    def seconds(self, work: StepWork, start: float, worker: int) -> float:
        """Of a step that a worker begins at this time of the run, in seconds."""
        ...


class Roofline:
    """Linear layers and attention are each bound by arithmetic or by memory, whichever takes longer.

    Source of the idea: Williams, Waterman, Patterson, "Roofline" (2009).
    """

    def __init__(self, device: Device, model: ModelWork) -> None:
        rate = device.matrix_rate * device.matrix_share
        bandwidth = device.memory_bandwidth * device.bandwidth_share
        self._fixed = device.step_overhead
        self._per_row = device.row_overhead
        self._weights = model.weight_bytes / bandwidth
        self._per_token = 2 * model.num_matrix_params / rate
        self._per_sample = 2 * model.num_head_params / rate
        self._per_pair = 4 * model.num_query_features / rate
        self._per_context = model.kv_bytes_per_token / bandwidth

    def seconds(self, work: StepWork, start: float = 0.0, worker: int = 0) -> float:
        linear = work.num_tokens * self._per_token + work.num_samples * self._per_sample
        attention = max(work.num_pairs * self._per_pair, work.num_context * self._per_context)
        return self._fixed + self._per_row * work.num_sequences + max(linear, self._weights) + attention
