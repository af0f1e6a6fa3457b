"""Drives a ModelRunner with plans made by hand, as a scheduler would, from a shuffled pool of blocks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.execution.runner import ModelRunner
from shared.messages.steps import AdmittedSequence, StepPlan, StepResult, TokenLogprobs
from shared.packing import pack_tokens
from shared.requests.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Live:
    """The driver's own truth of one row."""

    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    eos_token_ids: list[int]
    adapter: str = ""  # digest
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    admitted: bool = False
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


class Driver:
    def __init__(self, runner: ModelRunner, *, order: int = 0) -> None:
        self.runner = runner
        self.live: dict[int, Live] = {}
        self.free = list(range(runner.capacity.num_blocks))
        random.Random(order).shuffle(self.free)
        self.num_steps = 0
        self._released: list[int] = []

    def add(
        self,
        row: int,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        eos_token_ids: Sequence[int] = (),
        adapter: str = "",
    ) -> Live:
        self.live[row] = Live(list(prompt), len(prompt), params, seed, list(eos_token_ids), adapter)
        return self.live[row]

    def step(
        self, schedule: Mapping[int, int], drafts: Mapping[int, Sequence[int]] | None = None, **changes: Any
    ) -> StepResult:
        """Run `schedule` (row -> number of tokens, drafts included), and take the result over.

        `changes` replace fields of the plan.
        """
        plan = msgspec.structs.replace(self.plan(schedule, drafts=drafts), **changes)
        result = self.runner.run(plan)
        sampled, logprobs = iter(result.sampled_token_ids), iter(result.logprobs)
        for entry, (row, count) in enumerate(zip(plan.rows, result.num_sampled, strict=True)):
            sequence, num_drafts = self.live[row], len((drafts or {}).get(row, ()))
            refused = num_drafts - (count - 1) if num_drafts else 0
            sequence.num_computed += plan.num_scheduled_tokens[entry] - refused
            sequence.prompt_logprobs += result.prompt_logprobs.get(entry, [])
            for _ in range(count):
                sequence.token_ids.append(next(sampled))
                sequence.logprobs.append(next(logprobs, None))
        return result

    def plan(
        self,
        schedule: Mapping[int, int],
        copies: Sequence[tuple[int, int]] = (),
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> StepPlan:
        admitted, counts, block_ids = [], [], []
        for row, count in schedule.items():
            sequence = self.live[row]
            new = self._grow(sequence, sequence.num_computed + count)
            if not sequence.admitted:
                sequence.admitted, new = True, list(sequence.blocks)
                admitted.append(self._admission(row, sequence))
            counts.append(len(new))
            block_ids += new
        self.num_steps += 1
        released, self._released = self._released, []
        proposed = [list((drafts or {}).get(row, ())) for row in schedule]
        return StepPlan(
            epoch=1,
            step_id=self.num_steps,
            admitted=admitted,
            rows=list(schedule),
            num_computed_tokens=[self.live[row].num_computed for row in schedule],
            num_scheduled_tokens=list(schedule.values()),
            num_new_blocks=counts,
            new_block_ids=block_ids,
            block_copies=list(copies),
            released_rows=released,
            num_draft_tokens=[len(one) for one in proposed] if drafts else [],
            draft_token_ids=[token for one in proposed for token in one],
        )

    def _admission(self, row: int, sequence: Live) -> AdmittedSequence:
        return AdmittedSequence(
            row=row,
            token_ids=pack_tokens(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt,
            params=sequence.params,
            seed=sequence.seed,
            eos_token_ids=sequence.eos_token_ids,
            adapter=sequence.adapter,
        )

    def _grow(self, sequence: Live, length: int) -> list[int]:
        needed = -(-length // self.runner.capacity.block_size) - len(sequence.blocks)
        new = [self.free.pop() for _ in range(needed)]
        sequence.blocks += new
        return new

    def preempt(self, row: int) -> None:
        """Take a row's blocks away; it will be admitted and computed again, from its first token."""
        sequence = self.live[row]
        self.free = sequence.blocks + self.free
        sequence.blocks, sequence.num_computed, sequence.admitted = [], 0, False
        self._released.append(row)

    def finish(self, row: int) -> None:
        self.free = self.live.pop(row).blocks + self.free
        self._released.append(row)

    def generate(self, num_tokens: int, *, chunk: int = 1 << 30) -> None:
        """Steps until every row has `num_tokens` tokens of output; prompts in pieces of `chunk`."""
        while schedule := {
            row: min(chunk, len(sequence.token_ids) - sequence.num_computed)
            for row, sequence in self.live.items()
            if len(sequence.output) < num_tokens
        }:
            self.step(schedule)
