"""The model runner: one plan in, one result out.

Public API: `ModelRunner.capacity` (sent to the scheduler), `.run(plan)`, `.reset()` at a new epoch.  Runs on one
thread and one stream or queue; a plan's work starts after that of the plan before it, so a block freed by the scheduler
after result n may be written by plan n + 2 without a fence.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from engine.execution.adapters import AdapterBank, NoLock
from engine.execution.constraints.constrained_step import ConstrainedStep, cut_drafts
from engine.execution.constraints.row_automata import RowAutomata
from engine.execution.drafts import Drafter
from engine.execution.inference import in_inference_mode
from engine.execution.outputs.partial import without
from engine.execution.outputs.pending_result import PendingResult, StepTimer, start_timer
from engine.execution.outputs.pooling import Classifier, RowPools
from engine.execution.outputs.results import StepOutputs, make_empty_result, make_result
from engine.execution.outputs.sampled_tokens import MissingSamples, SampledTokens, pick
from engine.execution.outputs.scoring import SampledScores, Scored, score_rows
from engine.execution.queued_steps import QueuedSteps
from engine.execution.schedule import Schedule, read_schedule
from engine.execution.tables.block_access import access_to
from engine.execution.tables.block_fence import BlockFence
from engine.execution.tables.deferred_verification import DeferredVerification
from engine.execution.tables.rows import RowsOutOfStep, RowTable
from engine.modeling.batch import Ints, StepBatch
from engine.modeling.kv_pool import KVPool
from engine.modeling.model import Captures, HasStages, Model, QueuesSteps
from engine.modeling.pool_backing import SETTLE, IdleTime, PageBacking
from engine.sampling.columns import NO_LOGPROBS
from engine.sampling.drafts import Drafts
from engine.sampling.sampler import Sampler
from engine.sampling.verification import Verification
from kernels.ops.steps.transfer import to_device
from shared.messages.control import WorkerCapacity
from shared.messages.fingerprint import Fingerprint
from shared.messages.steps import RefusedRow, StepPlan, StepResult


class BegunStep(NamedTuple):
    """A step that the rows' tables know of, and that is not sampled yet."""

    plan: StepPlan
    clock: StepTimer
    fenced: list[RefusedRow]
    held: ConstrainedStep | None  # None: nothing is computed


class ModelRunner:
    """Applies plans in order.  A row on which scheduler and worker disagree is refused, and the others go on;
    FatalError: the plan is malformed."""

    def __init__(
        self,
        *,
        model: Model,
        pool: KVPool,
        table: RowTable,
        sampler: Sampler,
        capacity: WorkerCapacity,
        automata: RowAutomata,
        idle: IdleTime,
        fingerprint: Fingerprint | None = None,
        no_native: str = "",
        adapters: AdapterBank | None = None,
        classifier: Classifier | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`fingerprint`: what it computes with; `no_native`: why that is torch where native kernels would be faster."""
        self.capacity = capacity
        self.fingerprint = fingerprint
        self.no_native = no_native
        self.adapters = adapters
        self._adapters_stay = NoLock() if adapters is None else adapters.lock  # from a step's look at them to its end
        self._model = model
        self._drafter = drafter
        self._staged = model if isinstance(model, HasStages) else None
        self._captures = model if drafter is not None and isinstance(model, Captures) else None
        self._table = table
        self._sampler = sampler
        self._verification = Verification(sampler)
        self._automata = automata
        self._pools = RowPools(classifier)
        self._deferred = DeferredVerification(table)
        self._pool = pool
        sizes = [one.num_blocks for one in pool.sliding]
        self._fence = BlockFence(table.num_rows, pool.num_blocks, pool.block_size, sizes)
        self._idle = idle
        queue = model if isinstance(model, QueuesSteps) and table.states is None and drafter is None else None
        self._queued = QueuedSteps(queue, table, self._idle)
        self._backings = [PageBacking(one.tensors, one.num_blocks, self._idle) for one in (pool, *pool.sliding)]
        self.blocks = None if capacity.keeps_states else access_to(pool, self._fence.first, fingerprint)
        if self.blocks is not None:
            places = {"block_space": self.blocks.space, "block_bytes": self.blocks.block_bytes}
            self.capacity = msgspec.structs.replace(capacity, **places)

    def reset(self) -> None:
        """Forget all rows: a new epoch begins, and its scheduler will admit everything again."""
        self._queued.catch_up()
        self._table.reset()
        self._automata.reset()
        self._pools.reset()
        self._deferred.clear()
        self._fence.reset()
        self._idle.go_on(SETTLE)
        for backing in self._backings:
            backing.follow(0)

    def holdings(self) -> tuple[list[int], list[int]]:
        """The rows in use, and a digest of the blocks of each, as of the plan that was launched last."""
        return self._fence.holdings()

    @property
    def queues(self) -> bool:
        """Whether steps may be queued."""
        return self._queued.is_on

    def run(self, plan: StepPlan) -> StepResult:
        """Refuse the entries that contradict their row's state.  Raises FatalError on a malformed plan."""
        return self.launch(plan).finish()

    @in_inference_mode
    def launch(self, plan: StepPlan) -> PendingResult:
        """The same, but does not wait for its end where it need not."""
        self._idle.pause()
        try:
            with self._adapters_stay:
                return self._launch(plan)
        finally:
            if self._queued.is_empty:
                self._idle.go_on()

    @in_inference_mode
    def begin(self, plan: StepPlan) -> BegunStep:
        """The part of `launch` that needs no result of the model: of a pipeline, whose first stages compute behind it,
        and of steps that are queued.  A pipeline's steps that are begun, and not finished, have no row in common."""
        self._idle.pause()
        self._adapters_stay.acquire()
        try:
            return self._begin(plan)
        except BaseException:
            self._adapters_stay.release()
            raise

    @in_inference_mode
    def finish(self, begun: BegunStep) -> StepResult:
        """Of the step that was begun first."""
        self._idle.pause()
        self._queued.catch_up()
        schedule = self._queued.taken(begun.held)
        try:
            pending = self._queued.compute(begun.plan, begun.fenced, schedule) if schedule else self._complete(begun)
            return pending.finish()
        finally:
            self._adapters_stay.release()
            self._idle.go_on()

    def is_alone(self, plan: StepPlan) -> bool:
        """Whether steps that are queued have to end before this one is begun."""
        return self._queued.disturbs(plan)

    @in_inference_mode
    def queue(self, begun: BegunStep) -> PendingResult | None:
        """None where the step is short, or the host has to look at what it computes: it is one for `finish`."""
        schedule = self._queued.taken(begun.held)
        if schedule is None or self._queued.is_short(begun.plan):
            return None
        pending = self._queued.put(begun.plan, begun.fenced, schedule)
        self._adapters_stay.release()  # what it names stays: the model drops nothing before its end
        return pending

    def call(self) -> None:
        """From any thread: one that waits for a step that is queued, or is about to, does not."""
        self._queued.call()

    def _launch(self, plan: StepPlan) -> PendingResult:
        if self.is_alone(plan):
            self._queued.catch_up()
        begun = self._begin(plan)
        if (schedule := self._queued.taken(begun.held)) is not None:
            return self._queued.put(plan, begun.fenced, schedule)
        self._queued.catch_up()
        return self._complete(begun)

    def _begin(self, plan: StepPlan) -> BegunStep:
        clock = start_timer(self._model.device)
        whole, fenced = self._read(plan, self._apply(plan))
        held = None if whole is None else ConstrainedStep(self._automata, whole)
        if held is not None and self._staged is not None:
            self._staged.begin(held.schedule.batch)
        return BegunStep(plan, clock, fenced, held)

    def _complete(self, begun: BegunStep) -> PendingResult:
        plan, clock, fenced, held = begun.plan, begun.clock, begun.fenced, begun.held
        if held is None:
            clock.stop()
            return PendingResult(partial(make_empty_result, plan, fenced), clock.seconds)
        batch, hidden, captured = self._forward(held)
        schedule, missing = held.hold()
        prompt_scores = self._prompt_scores(schedule, hidden) if len(schedule.scored) else {}
        embeddings = self._pools.take(schedule, hidden) if len(schedule.pooled) else {}
        sampled, scores = self._sample(schedule, hidden, missing)
        self._commit(schedule, sampled, missing)
        held.advance(sampled, missing)
        if plan.state_saves and self._table.states is not None:
            self._table.states.save(plan, schedule.batch.rows.tolist())
        refused = {} if missing is None else missing.refused
        drafts = self._draft(plan, batch, captured)
        found = StepOutputs(sampled, scores, prompt_scores, embeddings, refused, *drafts)
        clock.stop()
        return PendingResult(partial(make_result, plan, fenced, found), clock.seconds)

    def _forward(
        self, held: ConstrainedStep
    ) -> tuple[StepBatch, Tensor, Tensor | None]:  # what is computed, [sum of wanted, hidden_size], of all tokens
        batch, states = held.schedule.batch, self._table.states
        if self._staged is not None:
            return batch, self._staged.finish(batch), None
        if states is not None:
            if len(entries := held.may_go_back()):
                states.keep(batch.rows[entries], batch.computed[entries])
            behind = states.behind(batch.rows, batch.computed)
            if np.count_nonzero(behind):
                changes = {"computed": batch.computed - behind, "scheduled": batch.scheduled + behind}
                batch = msgspec.structs.replace(batch, **changes)
        if self._drafter is not None and self._captures is not None:
            return batch, *self._captures.forward_captured(batch, self._drafter.captures)
        return batch, self._model.forward(batch), None

    def _draft(self, plan: StepPlan, batch: StepBatch, captured: Tensor | None) -> tuple[list[int], list[int]]:
        """Of each entry that was computed, how many, and all that the model's head drafts."""
        if self._drafter is None or captured is None:
            return [], []
        rows = batch.rows.tolist()
        self._deferred.settle(rows)
        by_row = dict(zip(plan.rows, plan.num_wanted_drafts, strict=True)) if plan.num_wanted_drafts else {}
        wanted = np.array([by_row.get(row, 0) for row in rows], np.int64)
        counts, ids = self._drafter.follow(batch, captured, wanted, is_certain=plan.rejection)
        return (counts, ids) if ids else ([], [])

    def _read(self, plan: StepPlan, fenced: list[RefusedRow]) -> tuple[Schedule | None, list[RefusedRow]]:
        """The schedule to compute, or None, and all entries that are refused."""
        part = without(plan, {one.entry for one in fenced}) if fenced else plan
        if not part.rows:
            return None, fenced
        self._deferred.settle(part.rows)
        try:
            return read_schedule(cut_drafts(part, self._automata), self._table), fenced
        except RowsOutOfStep as error:
            more = [self._fence.refuse(plan, plan.rows.index(row)) for row in error.rows]
            return self._read(plan, [*fenced, *more])

    def _apply(self, plan: StepPlan) -> list[RefusedRow]:
        """The plan's changes of state, but for the entries that are returned: they would touch what is not theirs."""
        self._fence.check_places(plan)
        self._table.release(plan.released_rows)
        self._pools.release(plan.released_rows)
        self._automata.release(plan.released_rows)
        first_computed = dict(zip(plan.rows, plan.num_computed_tokens, strict=True))
        for sequence in plan.admitted:
            self._table.admit(sequence, first_computed.get(sequence.row, 0))
            self._automata.admit(sequence)
            self._pools.admit(sequence)
        if self._table.states is not None:
            self._table.states.begin(plan)
        self._deferred.drop([*plan.released_rows, *(sequence.row for sequence in plan.admitted)])
        self._table.append_blocks(plan.rows, plan.num_new_blocks, plan.new_block_ids)
        for index, sliding in enumerate(plan.sliding, 1):
            self._table.leave_blocks(plan.rows, sliding.num_left_blocks, index)
            self._table.append_blocks(plan.rows, sliding.num_new_blocks, sliding.new_block_ids, index)
        self._table.flush()
        new_block_ids = (plan.new_block_ids, *(sliding.new_block_ids for sliding in plan.sliding))
        for backing, ids in zip(self._backings, new_block_ids, strict=False):
            if ids:
                backing.follow(max(ids) + 1)
        fenced = self._fence.read(plan)
        for pool, copies in zip((self._pool, *self._pool.sliding), self._fence.keeps(plan, fenced), strict=False):
            pool.copy_blocks(copies)
        return fenced

    def _sample(
        self,
        schedule: Schedule,
        hidden: Tensor,  # [sum of wanted, hidden_size]
        missing: MissingSamples | None,
    ) -> tuple[SampledTokens, SampledScores | None]:
        batch, columns = schedule.positions, self._table.columns
        if len(batch.rows) == 0:
            return SampledTokens(schedule, missing, self._table.tokens[0, :0], None), None
        if len(schedule.scored) or len(schedule.pooled):
            hidden = hidden[to_device(schedule.sampled_places(), hidden.device)]
        if np.count_nonzero(columns.plain[batch.rows]) == len(batch.rows):
            return self._take_likeliest(schedule, hidden, missing), None
        logits = self._model.logits(hidden, self._head_adapters(batch.rows))
        asked = np.flatnonzero(columns.logprobs[batch.rows] != NO_LOGPROBS)
        raw = logits[to_device(asked, logits.device)] if len(asked) else None
        if schedule.drafts is None:
            sampled = SampledTokens(schedule, missing, self._sampler.sample(logits, batch), None)
        else:
            verdict = self._verification.verify(logits, batch, schedule.drafts)
            sampled = SampledTokens(schedule, missing, verdict.tokens, verdict)
        return sampled, None if raw is None else self._score_sampled(raw, asked, batch.rows, sampled)

    def _take_likeliest(
        self,
        schedule: Schedule,
        hidden: Tensor,  # [num_positions, hidden_size]
        missing: MissingSamples | None,
    ) -> SampledTokens:
        chosen = self._model.greedy(hidden, self._head_adapters(schedule.positions.rows))
        if schedule.drafts is None:
            return SampledTokens(schedule, missing, chosen, None)
        verdict = self._verification.settle(chosen, schedule.positions, schedule.drafts)
        return SampledTokens(schedule, missing, verdict.tokens, verdict)

    def _score_sampled(
        self,
        raw: Tensor,  # [num_asked, vocab_size]
        asked: Ints,  # [num_asked] positions
        rows: Ints,  # [num_positions]
        sampled: SampledTokens,
    ) -> SampledScores:
        """Where it is not known yet which positions come out, of all that may."""
        if sampled.is_known and not (comes_out := np.isin(asked, sampled.yielded.places)).all():
            raw, asked = raw[to_device(np.flatnonzero(comes_out), raw.device)], asked[comes_out]
        tokens = sampled.tokens[to_device(asked, sampled.tokens.device)].to(raw.device)
        columns, rows = self._table.columns, rows[asked]
        named = [columns.named[row] for row in rows.tolist()]
        return SampledScores(asked, score_rows(raw.__getitem__, tokens, columns.logprobs[rows], raw.shape[1], named))

    def _commit(self, schedule: Schedule, sampled: SampledTokens, missing: MissingSamples | None) -> None:
        """What the step computed and took belongs to the rows."""
        table, batch = self._table, schedule.batch
        rows, samples = batch.rows[schedule.samples], None
        table.num_computed[batch.rows] = batch.computed + batch.scheduled
        if table.states is not None:
            table.states.advance(batch.rows, batch.computed + batch.scheduled)
        if missing is not None:
            table.hold_back(rows[missing.samples])
            samples = np.delete(np.arange(len(rows)), missing.samples)
            rows = rows[samples]
        if schedule.drafts is not None:
            self._commit_drafts(schedule.drafts, sampled, rows, samples)
        else:
            table.append_tokens(rows, sampled.tokens if samples is None else pick(sampled.tokens, samples))

    def _commit_drafts(self, drafts: Drafts, sampled: SampledTokens, rows: Ints, samples: Ints | None) -> None:
        """`samples` are those of the rows, where some are left out.  What was verified is written already; of rows
        without drafts it is known how long they are."""
        chosen = slice(None) if samples is None else samples
        counts = drafts.counts[chosen]
        later = counts > 0
        places = np.arange(len(drafts.counts))[chosen]
        self._table.num_tokens[rows[~later]] += 1
        self._deferred.defer(rows[later], places[later], counts[later], sampled)

    def _prompt_scores(
        self,
        schedule: Schedule,
        hidden: Tensor,  # [sum of wanted, hidden_size]
    ) -> dict[int, Scored]:
        """For each scored entry: of the prompt's tokens that follow one computed in this step."""
        columns, batch = self._table.columns, schedule.batch
        starts = np.cumsum(batch.wanted) - batch.wanted
        found: dict[int, Scored] = {}
        for entry in schedule.scored.tolist():
            row, first = int(batch.rows[entry]), int(batch.computed[entry]) + 1
            count = min(int(batch.scheduled[entry]), int(columns.num_prompt[row]) - first)
            states = hidden[int(starts[entry]) :][:count]
            targets = self._table.tokens[row, first : first + count]
            asked = np.full(count, int(columns.prompt_logprobs[row]))
            adapters = self._head_adapters(np.full(count, row))
            logits = partial(self._logits_of, states, adapters)
            found[entry] = score_rows(logits, targets, asked, self._table.vocab_size)
        return found

    def _logits_of(
        self,
        states: Tensor,  # [n, hidden_size]
        adapters: Ints | None,  # [n]
        rows: slice,
    ) -> Tensor:  # [number of rows, vocab_size] float32
        return self._model.logits(states[rows], None if adapters is None else adapters[rows])

    def _head_adapters(
        self,
        rows: Ints,  # [n]
    ) -> Ints | None:  # [n] places of adapters; None: none changes the head
        if self.adapters is None or not self.adapters.changes_head:
            return None
        return self._table.adapters(rows)
