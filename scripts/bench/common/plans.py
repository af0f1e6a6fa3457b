"""Steps of a model runner by plans made by hand: each row has blocks of its own; nothing is scheduled or cached."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.execution.runner import ModelRunner
from shared.messages import AdmittedSequence, StepPlan
from shared.packing import pack_tokens
from shared.sampling import SamplingParams

BLOCK = 16  # tokens


class PlanMaker:
    """Plans of greedy rows that may generate `room` tokens each; prompts are drawn at random."""

    def __init__(self, runner: ModelRunner, room: int) -> None:
        self._vocabulary = range(runner.capacity.vocab_size)
        self._room = room
        self._rng = random.Random(1)
        self._step_id = 0

    def admit(self, rows: Sequence[int], length: int) -> StepPlan:
        """Prompts, computed in one step, with blocks for them and for all that is generated."""
        params = SamplingParams(temperature=0.0, max_tokens=self._room + 1, ignore_eos=True)
        admitted = [AdmittedSequence(row, pack_tokens(self._draw(length)), length, params, 0, []) for row in rows]
        return self._plan(rows, 0, length, admitted=admitted, num_blocks=-(-(length + self._room) // BLOCK))

    def decode(self, rows: Sequence[int], computed: int) -> StepPlan:
        """One token for each row."""
        return self._plan(rows, computed, 1)

    def _plan(
        self,
        rows: Sequence[int],
        computed: int,
        scheduled: int,
        admitted: Sequence[AdmittedSequence] = (),
        num_blocks: int = 0,
    ) -> StepPlan:
        self._step_id += 1
        return StepPlan(
            epoch=1, step_id=self._step_id, admitted=list(admitted), rows=list(rows),
            num_computed_tokens=[computed] * len(rows), num_scheduled_tokens=[scheduled] * len(rows),
            num_new_blocks=[num_blocks] * len(rows), block_copies=[], released_rows=[],
            new_block_ids=[row * num_blocks + index for row in rows for index in range(num_blocks)],
        )  # fmt: skip

    def _draw(self, count: int) -> list[int]:
        return self._rng.choices(self._vocabulary, k=count)
