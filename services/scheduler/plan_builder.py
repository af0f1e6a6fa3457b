"""Turns the decisions of one step into the plan that goes to the worker."""

from __future__ import annotations

import msgspec

from services.scheduler.replica import Entry, Replica, Step
from services.scheduler.sequence import Sequence
from shared.messages import AdmittedSequence, StepPlan
from shared.packing import pack_tokens


class PlanBuilder:
    """Collects one step's entries; one that is preempted again before the plan is complete leaves no trace.

    `tables` remembers how long each table was before the step, so that the plan carries only what is new.
    """

    def __init__(self, replica: Replica, budget: int) -> None:
        self.replica = replica
        self.budget = budget  # tokens that the step can still take
        self.has_preempted = False
        self.copies: dict[Sequence, tuple[int, int]] = {}
        self._entries: dict[Sequence, Entry] = {}
        self._known_blocks: dict[Sequence, int] = {}
        self._admitted: set[Sequence] = set()

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def schedule(self, sequence: Sequence, num_tokens: int, num_known_blocks: int) -> None:
        """Give a sequence its part; its table is complete and had `num_known_blocks` before."""
        samples = num_tokens == sequence.num_behind
        self._entries[sequence] = Entry(sequence, sequence.num_computed_tokens, num_tokens, samples)
        self._known_blocks[sequence] = num_known_blocks
        self.budget -= num_tokens

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule a sequence that starts now: the worker has nothing of it."""
        self._admitted.add(sequence)
        self.schedule(sequence, num_tokens, 0)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence's part back, if it had one."""
        self.has_preempted = True
        if entry := self._entries.pop(sequence, None):
            self.budget += entry.num_scheduled

    def commit(self) -> Step:
        """Count the entries as computed, and their samples as pending: the plan will be sent."""
        replica = self.replica
        step = Step(replica.num_steps, self.entries)
        for entry in step.entries:
            entry.sequence.num_computed_tokens += entry.num_scheduled
            entry.sequence.num_pending += entry.samples
            entry.sequence.num_in_flight += 1
        replica.num_steps += 1
        replica.in_flight.append(step)
        return step

    def build(self, step: Step) -> StepPlan:
        new_blocks = [e.sequence.block_ids[self._known_blocks[e.sequence] :] for e in step.entries]
        return StepPlan(
            epoch=self.replica.epoch,
            step_id=step.step_id,
            admitted=[admitted(e.sequence) for e in step.entries if e.sequence in self._admitted],
            rows=[e.sequence.row for e in step.entries],
            num_computed_tokens=[e.num_computed for e in step.entries],
            num_scheduled_tokens=[e.num_scheduled for e in step.entries],
            num_new_blocks=[len(blocks) for blocks in new_blocks],
            new_block_ids=[block for blocks in new_blocks for block in blocks],
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
