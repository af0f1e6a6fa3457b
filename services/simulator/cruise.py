"""Steps that give each sequence of a worker one more token, and in which nothing else happens: taken without the core.

Most steps of a simulated worker are like that: no request comes, none ends.  What the core would do in them is known
beforehand, so they are taken here by counting, and the core's state is set when it is used again (`settle`).  What
others look at meanwhile is never late: blocks are given, named and found in the step in which the core would have given
and named them, since placement looks into the pools of all workers, and tenants are charged step by step.

Invariant: a run with cruises and one without are the same to the last digit (tests/unit/simulator/test_cruise.py).
"""

from __future__ import annotations

from collections import Counter

from services.scheduler.draft_length.proposal import NO_DRAFTS
from services.scheduler.planning.plan_builder import NONE
from services.scheduler.scheduler import MAX_STEPS_IN_FLIGHT, Scheduler
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Sequence, Status
from services.scheduler.state.step import Step
from services.simulator.observer import Observer
from shared.metrics.steps import StepWork

MIN_STEPS = 2  # fewer are not worth the count
ANY_TOKEN = 1


class Cruise:
    """One worker between two events; two steps are in flight, each with all sequences that run.

    Times are numbers of steps since it began: at the one numbered j, the oldest plan's tokens are taken in, which are
    the j-th of each sequence, and another step is planned.  Every request ends by its length alone.
    """

    def __init__(self, core: Scheduler, replica: Replica, observer: Observer, num_steps: int) -> None:
        self.num_steps = 0
        self.num_pairs = 0  # of all its steps
        self._core, self._replica, self._observer = core, replica, observer
        self._waiting = replica.waiting
        self._end = num_steps
        self._running = list(replica.running)
        self._lengths = [sequence.num_tokens for sequence in self._running]  # when it began
        self._records = [observer.records[sequence.request.request_id] for sequence in self._running]
        self._lasts: dict[float, int] = Counter(record.last for record in self._records)
        self._told = 0.0
        self._tenants = _charges(core, self._running)
        self._turns = [replica.block_size - length % replica.block_size for length in self._lengths]
        self._next_turn = min(self._turns)
        self._plans = {place: (step.sequences, step.new_blocks) for place, step in enumerate(replica.in_flight, -1)}
        self._plain = (self._running, [NONE] * len(self._running))
        count, context = len(self._running), sum(self._lengths)
        self.work = StepWork(count, count, count, context + count, context + count)  # of the step that was planned last

    def go_on(self, now: float, told: float) -> bool:
        """Take tokens in that reach their clients at `told`, and plan a step; False, and nothing, where the core has to
        be asked."""
        number = self.num_steps + 1
        if number > self._end or self._waiting.num_tokens:
            return False
        if number == self._next_turn:
            if not self._has_blocks(number):
                return False
            self._core.clock.now = now
            self._plans[number] = self._turn(number)
        self.num_steps = number
        for tenant, count in self._tenants:
            self._core.shares.charge_output(tenant, count)
        work, count = self.work, self.work.num_sequences
        if self._lasts:
            self._note_first(told)
        else:
            self._observer.gaps.add(told - self._told, count)
        self._told = told
        work.num_context = work.num_pairs = work.num_pairs + count
        self.num_pairs += work.num_pairs
        return True

    def _note_first(self, told: float) -> None:
        """Tokens that came before it began came to each sequence in its own time."""
        for last, count in self._lasts.items():
            self._observer.gaps.add(told - last, count)
        self._lasts.clear()

    def settle(self) -> None:
        """Bring the core's state to where it is."""
        if not self.num_steps:
            return
        for index, (sequence, record) in enumerate(zip(self._running, self._records, strict=True)):
            self._catch_up(index, self.num_steps)
            sequence.num_computed_tokens = self._lengths[index] + 1 + self.num_steps
            sequence.num_emitted += self.num_steps
            record.num_tokens += self.num_steps
            record.last = self._told
        replica = self._replica
        steps = [self._step(self.num_steps - 1), self._step(self.num_steps)]
        replica.in_flight.clear()
        replica.in_flight.extend(steps)
        replica.num_steps += self.num_steps
        self._core.counters.num_output_tokens += self.num_steps * len(self._running)

    def _step(self, number: int) -> Step:
        """What was planned at this time, or before it began."""
        sequences, new_blocks = self._plans.get(number, self._plain)
        ones, drafts = [1] * len(sequences), [NO_DRAFTS] * len(sequences)
        lengths = dict(zip(self._running, self._lengths, strict=True))
        computed = [lengths[sequence] + number for sequence in sequences]
        step_id = self._replica.in_flight[0].step_id + 1 + number
        return Step(step_id, sequences, computed, ones, ones, new_blocks, drafts)

    # -- ends of blocks

    def _has_blocks(self, number: int) -> bool:
        """Whether the pool has the blocks that sequences need in this step, without a preemption."""
        available = self._replica.pool.num_available
        return available >= self._turns.count(number) or available >= sum(map(self._grows, self._turning(number)))

    def _turning(self, number: int) -> list[int]:
        """Places of the sequences that come to the end of a block."""
        return [index for index, turn in enumerate(self._turns) if turn == number]

    def _grows(self, index: int) -> bool:
        """Whether a sequence at the end of a block has no other."""
        return (
            self._lengths[index] + self._turns[index] >= len(self._running[index].block_ids) * self._replica.block_size
        )

    def _turn(self, number: int) -> tuple[list[Sequence], list[list[int]]]:
        """Give blocks to those that need one, and make those findable that are full; returns the plan:
        sequences that grow come after the others."""
        replica, turning = self._replica, self._turning(number)
        grown = {self._running[index]: replica.grow(self._running[index], 1) for index in turning if self._grows(index)}
        for index in turning:
            self._catch_up(index, number)
            self._turns[index] += replica.block_size
        self._next_turn = min(self._turns)
        plan = [sequence for sequence in self._running if sequence not in grown] + list(grown)
        if self._core.policy.enable_prefix_caching:
            ends = {self._running[index] for index in turning}
            for sequence in plan:
                if sequence in ends:
                    sequence.num_computed_tokens = sequence.num_tokens + 1
                    replica.register_full(sequence)
        return plan, [grown.get(sequence, NONE) for sequence in plan]

    def _catch_up(self, index: int, number: int) -> None:
        """Give a sequence the tokens up to this step's."""
        token_ids = self._running[index].token_ids
        token_ids += [ANY_TOKEN] * (self._lengths[index] + number - len(token_ids))


def cruise_of(core: Scheduler, replica: Replica, observer: Observer) -> Cruise | None:
    """What a worker can do now without the core; None where that is next to nothing."""
    if len(replica.in_flight) < MAX_STEPS_IN_FLIGHT or not replica.running or not _is_undisturbed(core, replica):
        return None
    count = len(replica.running)
    if any(not len(step.sequences) == sum(step.num_scheduled) == sum(step.num_samples) == count
           for step in replica.in_flight):  # fmt: skip
        return None
    if not all(_is_decoding(core, replica, sequence) for sequence in replica.running):
        return None
    num_steps = min(_num_plain(sequence) for sequence in replica.running)
    return Cruise(core, replica, observer, num_steps) if num_steps >= MIN_STEPS else None


def _is_undisturbed(core: Scheduler, replica: Replica) -> bool:
    """Whether no request waits, and workers get nothing but tokens."""
    if replica.num_background:
        return False
    if replica.sliding or replica.waiting or core.forks or replica.released_rows or core.drafts:
        return False
    return len(replica.running) <= core.policy.max_num_batched_tokens


def _is_decoding(core: Scheduler, replica: Replica, sequence: Sequence) -> bool:
    """Whether a sequence has said something, and has a token in each of two steps in flight."""
    num_tokens = len(sequence.token_ids)
    return (
        sequence.status is Status.RUNNING
        and 0 < sequence.num_emitted == num_tokens - sequence.request.num_prompt_tokens
        and sequence.num_pending == sequence.num_in_flight == MAX_STEPS_IN_FLIGHT
        and sequence.num_computed_tokens == num_tokens + 1
        and (
            sequence.num_registered_blocks == num_tokens // replica.block_size or not core.policy.enable_prefix_caching
        )
    )


def _num_plain(sequence: Sequence) -> int:
    """Steps until the one in which a sequence has no part, since its last token is coming."""
    return sequence.request.max_length - len(sequence.token_ids) - 2


def _charges(core: Scheduler, running: list[Sequence]) -> list[tuple[str, int]]:
    """Tenants, and what to charge them at once: whole numbers add up alike in any order; where there are weights, each
    token is charged by itself, as the core does."""
    tenants = [sequence.tenant for sequence in running]
    return [(tenant, 1) for tenant in tenants] if core.policy.tenant_weights else list(Counter(tenants).items())
