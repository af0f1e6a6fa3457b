"""Turns the decisions of one step into the plan that goes to the worker."""

from __future__ import annotations

from itertools import chain

import msgspec

from services.scheduler.replica import Replica, Step
from services.scheduler.sequence import Sequence
from shared.messages import AdmittedSequence, StepPlan
from shared.packing import pack_tokens

NONE: list[int] = []  # no new blocks; never written to


class PlanBuilder:
    """Collects one step; a sequence that is preempted again before the plan is complete leaves no trace."""

    def __init__(self, replica: Replica, budget: int) -> None:
        self.replica = replica
        self.budget = budget  # tokens that the step can still take
        self.has_preempted = False
        self.step = Step(replica.num_steps)
        self.copies: dict[Sequence, tuple[int, int]] = {}
        self._admitted: list[Sequence] = []

    def schedule(self, sequence: Sequence, num_tokens: int, num_samples: int, new_blocks: list[int]) -> None:
        """Give a sequence its part; its table is complete, `new_blocks` being the end of it that the worker lacks."""
        step = self.step
        step.sequences.append(sequence)
        step.num_computed.append(sequence.num_computed_tokens)
        step.num_scheduled.append(num_tokens)
        step.num_samples.append(num_samples)
        step.new_blocks.append(new_blocks)
        self.budget -= num_tokens

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule a sequence that starts now: the worker has nothing of it."""
        self._admitted.append(sequence)
        self.schedule(sequence, num_tokens, int(num_tokens == sequence.num_behind), sequence.block_ids)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence's part back, if it had one."""
        self.has_preempted = True
        self.budget += self.step.drop(sequence)

    def commit(self) -> StepPlan:
        """Count the step's parts as computed, and their samples as pending: the plan will be sent."""
        step, replica = self.step, self.replica
        plan = self._build()
        for sequence, num_tokens, num_samples in zip(step.sequences, step.num_scheduled, step.num_samples, strict=True):
            sequence.num_computed_tokens += num_tokens
            sequence.num_pending += num_samples
            sequence.num_in_flight += 1
        replica.num_steps += 1
        replica.in_flight.append(step)
        return plan

    def _build(self) -> StepPlan:
        step = self.step
        return StepPlan(
            epoch=self.replica.epoch,
            step_id=step.step_id,
            admitted=[admitted(sequence) for sequence in self._admitted],
            rows=[sequence.row for sequence in step.sequences],
            num_computed_tokens=step.num_computed,
            num_scheduled_tokens=step.num_scheduled,
            num_new_blocks=[len(blocks) for blocks in step.new_blocks],
            new_block_ids=list(chain.from_iterable(step.new_blocks)),
            block_copies=list(self.copies.values()),
            released_rows=self.replica.take_released_rows(),
        )


def admitted(sequence: Sequence) -> AdmittedSequence:
    """All that a worker needs to know of a sequence, to begin or to begin again."""
    request, params = sequence.request, sequence.request.params
    if params.prompt_logprobs is not None and not sequence.wants_prompt_logprobs:
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    return AdmittedSequence(
        row=sequence.row,
        token_ids=pack_tokens(sequence.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        params=params,
        seed=((params.seed or 0) + sequence.index + 2**63) % 2**64 - 2**63,
        eos_token_ids=request.eos_token_ids,
        request_id=request.request_id,
        trace_id=request.header.trace_id,
        index=sequence.index,
    )
