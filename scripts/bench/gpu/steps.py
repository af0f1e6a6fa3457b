"""Steps of the model runner with random weights, by plans made by hand: every row has blocks of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from engine.execution.loading import load_runner
from engine.execution.runner import ModelRunner
from scripts.bench.gpu.shapes import GpuModelShape
from shared.config import Settings
from shared.messages import AdmittedSequence, StepPlan
from shared.packing import pack_tokens
from shared.sampling import SamplingParams

BLOCK: Literal[16] = 16  # tokens
CHUNK = 8192  # tokens of a prompt in one step
NUM_STEPS = 40


class Runs:
    """One model on one device."""

    def __init__(self, directory: Path, shape: GpuModelShape, *, device: str, num_rows: int, max_len: int) -> None:
        self._shape = shape
        self._rng = random.Random(1)
        self._step_id = 0
        settings = Settings.of(
            model=str(directory), load_format="dummy", device=device, kernels="torch", max_num_seqs=num_rows,
            max_num_batched_tokens=max(CHUNK, num_rows), max_model_len=max_len, block_size=BLOCK,
            num_blocks=num_rows * (max_len // BLOCK) if device == "cpu" else 0,
        )  # fmt: skip
        self.runner: ModelRunner = load_runner(settings)

    def decode(self, num_seqs: int, context: int) -> tuple[float, float]:
        """Seconds of a step: on the device, and as the host sees them where it launches two ahead."""
        self._fill(num_seqs, context)
        taken, launched = [], []
        begin = time.perf_counter()
        for index in range(NUM_STEPS):
            launched.append(self.runner.launch(self._plan(num_seqs, context + index, 1)))
            if len(launched) > 1:
                taken.append(launched.pop(0).finish().device_time)
        taken.append(launched.pop().finish().device_time)
        return median(taken[2:]), (time.perf_counter() - begin) / NUM_STEPS

    def prefill(self, num_tokens: int) -> float:
        """Seconds of one prompt in one step, the better half of three."""
        return median(self._fill(1, num_tokens) for _ in range(3))

    def _fill(self, num_seqs: int, context: int) -> float:
        """Prompts, as many at a time as a step takes; seconds of the last of these steps."""
        self.runner.reset()
        per_step, seconds = max(1, CHUNK // context), 0.0
        for first in range(0, num_seqs, per_step):
            rows = range(first, min(first + per_step, num_seqs))
            seconds = self.runner.run(self._admit(rows, context)).device_time
        return seconds

    def _admit(self, rows: Sequence[int], context: int) -> StepPlan:
        vocabulary = range(self._shape.vocab_size)
        params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS + 1, ignore_eos=True)
        admitted = [
            AdmittedSequence(row, pack_tokens(self._rng.choices(vocabulary, k=context)), context, params, 0, [])
            for row in rows
        ]
        return self._plan_rows(rows, 0, context, admitted)

    def _plan(self, num_seqs: int, computed: int, scheduled: int) -> StepPlan:
        return self._plan_rows(range(num_seqs), computed, scheduled, ())

    def _plan_rows(
        self, rows: Sequence[int], computed: int, scheduled: int, admitted: Sequence[AdmittedSequence]
    ) -> StepPlan:
        """Blocks come with the admission, for the prompt and all that is generated."""
        per_row = -(-(scheduled + NUM_STEPS) // BLOCK) if admitted else 0
        self._step_id += 1
        blocks = [row * per_row + index for row in rows for index in range(per_row)]
        return StepPlan(
            epoch=1, step_id=self._step_id, admitted=list(admitted), rows=list(rows),
            num_computed_tokens=[computed] * len(rows), num_scheduled_tokens=[scheduled] * len(rows),
            num_new_blocks=[per_row] * len(rows), new_block_ids=blocks, block_copies=[], released_rows=[],
        )  # fmt: skip
