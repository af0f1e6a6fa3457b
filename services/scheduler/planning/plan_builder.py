"""Turns the decisions of one step into the plan that goes to the worker."""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec

from services.scheduler.draft_length.proposal import NO_DRAFTS, VerifiableDrafts
from services.scheduler.state.policy import Policy
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence
from services.scheduler.state.step import Step
from shared.messages import SlidingPlan, StepPlan

NONE: list[int] = []  # no new blocks; never written to
BlockCopy = tuple[int, int, int]  # source, its generation, destination


class PlanBuilder:
    """Collects one step after the other; a sequence that is preempted before the plan is complete leaves no trace."""

    def __init__(self, replica: Replica, policy: Policy, unsent: set[Sequence]) -> None:
        """`unsent`: sequences whose worker has another last token, or does not have the row at all."""
        self.replica = replica
        self.unsent = unsent
        self._rejection = policy.acceptance == "rejection"
        self._max_tokens = policy.max_num_batched_tokens
        self.copies: dict[Sequence, list[BlockCopy]] = {}  # of each pool
        self._state_forks: dict[Sequence, int] = {}  # to the rows of others
        self._admitted: list[Sequence] = []
        self._sources: list[tuple[int, int]] = []  # pool and block of copies' sources, held until the plan is made
        self.clear()

    def clear(self) -> None:
        """Forget the step that was made or given up, and begin the next one."""
        self.step = Step()
        self.budget = self._max_tokens  # tokens that the step can still take
        self.has_preempted = False
        self.num_wanted_drafts: list[int] = []
        self.copies.clear()
        self._state_forks.clear()
        self._admitted.clear()
        if self._sources:
            for pool, block in self._sources:
                self.replica.pools[pool].release([block])
            self._sources.clear()

    def schedule(
        self,
        sequence: Sequence,
        num_tokens: int,
        num_samples: int,
        new_blocks: list[int],
        drafts: VerifiableDrafts = NO_DRAFTS,
    ) -> None:
        """Give a sequence its part; its tables are complete, `new_blocks` being the end of the first that the worker
        lacks.  A row that the worker has to get anew is sent with its whole tables.

        `num_tokens` counts the draft tokens too.
        """
        if self.unsent and sequence in self.unsent:
            self.unsent.remove(sequence)
            self._admitted.append(sequence)
            new_blocks = sequence.block_ids
            for table in sequence.sliding:
                table.sent_first = table.sent_end = 0
        step = self.step
        step.sequences.append(sequence)
        step.num_computed.append(sequence.num_computed_tokens)
        step.num_scheduled.append(num_tokens)
        step.num_samples.append(num_samples)
        step.new_blocks.append(new_blocks)
        step.drafts.append(drafts)
        step.num_drafts += len(drafts.token_ids)
        self.budget -= num_tokens

    def schedule_one_each(self, sequences: list[Sequence]) -> None:
        """Give each its next token, for which it has room in its blocks: column by column, as most steps are nothing
        else."""
        if self.unsent and not self.unsent.isdisjoint(sequences):
            for sequence in sequences:
                self.schedule(sequence, 1, 1, NONE)
            return
        step, count = self.step, len(sequences)
        step.sequences += sequences
        step.num_computed += [sequence.num_computed_tokens for sequence in sequences]
        step.num_scheduled += [1] * count
        step.num_samples += [1] * count
        step.new_blocks += [NONE] * count
        step.drafts += [NO_DRAFTS] * count
        self.budget -= count

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule a sequence that starts now: the worker has nothing of it."""
        self.unsent.add(sequence)
        self.schedule(sequence, num_tokens, int(num_tokens == sequence.num_behind), sequence.block_ids)

    def copy(self, sequence: Sequence, source: int, generation: int, destination: int, pool: int) -> None:
        """Have a sequence begin with the copies of one block of each pool; `generation` is that in which the source is
        held (`hold`)."""
        assert len(self.copies.setdefault(sequence, [])) == pool
        self.copies[sequence].append((source, generation, destination))

    def hold(self, block: int, pool: int = 0) -> None:
        """Keep a block that is to be copied from being given out in this plan: no sequence may hold it, or the one that
        does is preempted before the plan is made."""
        self.replica.pools[pool].share([block])
        self._sources.append((pool, block))

    def fork_state(self, sequence: Sequence, source: Sequence) -> None:
        """Have a sequence begin with the state of another, as it is before the step."""
        if self.replica.snapshots is not None:
            self._state_forks[sequence] = source.row

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence's part back, if it had one."""
        self.budget += self.step.drop(sequence)
        self.copies.pop(sequence, None)
        self._state_forks.pop(sequence, None)
        if sequence in self._admitted:
            self._admitted.remove(sequence)

    def commit(self) -> StepPlan:
        """Count the step's parts as computed, and their samples as pending: the plan will be sent."""
        step, replica = self.step, self.replica
        step.step_id = replica.num_steps
        plan = self._build()
        for sequence, num_tokens, num_samples in zip(step.sequences, step.num_scheduled, step.num_samples, strict=True):
            sequence.num_computed_tokens += num_tokens
            sequence.num_pending += num_samples
            sequence.num_in_flight += 1
        if step.num_drafts:
            self._count_drafts()
        step.num_admitted = len(self._admitted)
        replica.num_steps += 1
        replica.in_flight.append(step)
        return plan

    def _count_drafts(self) -> None:
        """Draft tokens count as computed only once they are accepted."""
        for sequence, drafts in zip(self.step.sequences, self.step.drafts, strict=True):
            sequence.num_computed_tokens -= len(drafts.token_ids)

    def _build(self) -> StepPlan:
        """Most steps are given no blocks, and have no drafts, copies or states: no time is spent on these."""
        step, replica = self.step, self.replica
        gets_blocks = any(step.new_blocks)
        plan = StepPlan(
            epoch=replica.epoch,
            step_id=step.step_id,
            admitted=[sequence.admitted(sequence.row) for sequence in self._admitted],
            rows=[sequence.row for sequence in step.sequences],
            num_computed_tokens=step.num_computed,
            num_scheduled_tokens=step.num_scheduled,
            num_new_blocks=[len(blocks) for blocks in step.new_blocks] if gets_blocks else [0] * len(step.sequences),
            new_block_ids=list(chain.from_iterable(step.new_blocks)) if gets_blocks else [],
            block_copies=[],
            released_rows=replica.take_released_rows(),
            rejection=self._rejection,
            new_block_generations=self._new_generations() if gets_blocks else [],
            num_wanted_drafts=self.num_wanted_drafts,
        )
        if step.num_drafts or self.copies or replica.has_partial_hits:
            return msgspec.structs.replace(plan, **self._rare_columns())
        return plan

    def _new_generations(self) -> list[int]:
        columns = zip(self.step.sequences, self.step.new_blocks, strict=True)
        tails = (sequence.block_generations[-len(blocks) :] for sequence, blocks in columns if blocks)
        return list(chain.from_iterable(tails))

    def _rare_columns(self) -> dict[str, Any]:
        """Fields of a plan: drafts, copies, windows and states."""
        step, copies = self.step, self.copies.values()
        drafts = step.drafts if step.num_drafts else []
        keeps_states = self.replica.snapshots is not None
        return {
            "block_copies": [(source, destination) for (source, _, destination), *_ in copies],
            "num_draft_tokens": [len(part.token_ids) for part in drafts],
            "draft_token_ids": [token for part in drafts for token in part.token_ids],
            "draft_distributions": [one for part in drafts for one in part.distributions],
            "copy_generations": [generation for (_, generation, _), *_ in copies],
            "sliding": self._build_sliding() if self.replica.sliding else [],
            "state_forks": [(sequence.row, row) for sequence, row in self._state_forks.items()],
            "state_loads": [(s.row, *snapshot) for s, snapshot in step.loads.items()] if keeps_states else [],
            "state_saves": [(s.row, *snapshot) for s, snapshot in step.saves.items()] if keeps_states else [],
        }

    def _build_sliding(self) -> list[SlidingPlan]:
        """What the worker does not know yet of the windows' tables."""
        plans = []
        for pool in range(len(self.replica.sliding)):
            tables = [sequence.sliding[pool] for sequence in self.step.sequences]
            new = [(table, max(0, table.sent_end - table.first)) for table in tables]
            copies = [copies[1 + pool] for copies in self.copies.values()]
            plans.append(
                SlidingPlan(
                    [table.first - table.sent_first for table in tables],
                    [len(table.block_ids) - start for table, start in new],
                    [block for table, start in new for block in table.block_ids[start:]],
                    [generation for table, start in new for generation in table.generations[start:]],
                    [(source, destination) for source, _, destination in copies],
                    [generation for _, generation, _ in copies],
                )
            )
            for table in tables:
                table.sent_first, table.sent_end = table.first, table.end
        return plans if any(map(changes, plans)) else []


def changes(plan: SlidingPlan) -> bool:
    return bool(plan.new_block_ids or plan.block_copies or any(plan.num_left_blocks))
