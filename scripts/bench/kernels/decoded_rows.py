"""Rows that decode without a scheduler, for benches that compare two ways to compute the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median

from engine.execution.runner import ModelRunner
from shared.messages import AdmittedSequence, StepPlan, StepResult
from shared.packing import pack_tokens
from shared.requests.sampling import SamplingParams

PROMPT = 100  # tokens of a row before the first step that is measured
VOCAB = 8000
GREEDY = SamplingParams(temperature=0.0)

Run = Callable[[list[StepPlan]], list[StepResult]]
Take = Callable[[], object]


class DecodedRows:
    """Rows of one runner that take a token in each step."""

    def __init__(
        self, runner: ModelRunner, rows: int, steps: int, take_threads: Take = lambda: None, run: Run | None = None
    ) -> None:
        """Compute the prompts, a row at a time; there is room for so many steps.

        `take_threads` is called at the beginning of each turn: others compute in this process too.  `run`: in the
        runner's place.
        """
        self._take_threads = take_threads
        self._run = run or (lambda plans: [runner.run(plan) for plan in plans])
        self._rows, self._length = list(range(rows)), PROMPT
        self._step_id, ids = 0, random.Random(rows)
        per_row = -(-(PROMPT + steps + 1) // runner.capacity.block_size)
        take_threads()
        runner.reset()
        for row in self._rows:
            tokens = pack_tokens(ids.choices(range(4, VOCAB), k=PROMPT))
            admitted = AdmittedSequence(row, tokens, PROMPT, GREEDY, 0, [])
            blocks = list(range(row * per_row, (row + 1) * per_row))
            self._run([self._plan([row], 0, PROMPT, blocks, [admitted])])

    def steps(self, count: int, run: Run | None = None) -> tuple[float, list[int]]:
        """Seconds of each, and all tokens.  `run`: for these steps alone."""
        plans = [self._plan(self._rows, self._length + step, 1, [], []) for step in range(count)]
        self._length += count
        self._take_threads()
        begin = time.perf_counter()
        results = (run or self._run)(plans)
        seconds = (time.perf_counter() - begin) / count
        return seconds, [token for result in results for token in result.sampled_token_ids]

    def _plan(
        self, rows: list[int], computed: int, scheduled: int, blocks: list[int], admitted: list[AdmittedSequence]
    ) -> StepPlan:
        plan = StepPlan(
            epoch=1,
            step_id=self._step_id,
            admitted=admitted,
            rows=rows,
            num_computed_tokens=[computed] * len(rows),
            num_scheduled_tokens=[scheduled] * len(rows),
            num_new_blocks=[len(blocks)] * len(rows),
            new_block_ids=blocks,
            block_copies=[],
            released_rows=[],
        )
        self._step_id += 1
        return plan


def beside(times: Sequence[tuple[float, float]]) -> str:
    """Of the seconds of a step of one and of another, round by round: the medians of the other beside the one."""
    one, other = (1000 * median(column) for column in zip(*times, strict=True))
    return f"{other:.2f} ms beside {one:.2f} ms"
