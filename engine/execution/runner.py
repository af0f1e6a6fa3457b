"""The model runner: one plan in, one result out.

Public API: `ModelRunner.capacity` (what the scheduler is told), `.run(plan)`, `.reset()` at a new epoch.  Runs on one
thread and one stream; a plan's work starts after that of the plan before it, so a block freed by the scheduler after
result n may be written by plan n + 2 without a fence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.execution.answers import Answer, start_clock
from engine.execution.block_fence import BlockFence
from engine.execution.held_step import HeldStep, cut_drafts
from engine.execution.partial import completed, without
from engine.execution.pooling import RowPools
from engine.execution.row_automata import RowAutomata
from engine.execution.rows import RowsOutOfStep, RowTable
from engine.execution.schedule import Schedule, read_schedule
from engine.execution.scoring import SampledScores, Scored, score_rows
from engine.execution.settlement import Settlement
from engine.execution.taken import Lack, Taken
from engine.modeling.batch import Ints
from engine.modeling.drafts import Drafts
from engine.modeling.kv_pool import KVPool
from engine.modeling.model import Model
from engine.modeling.sampler import Sampler
from engine.modeling.sampling_columns import NO_LOGPROBS
from engine.modeling.verification import Verification
from kernels.ops.transfer import to_device
from shared.automata.limits import GrammarError
from shared.automata.vocabulary import Vocabulary
from shared.errors import FatalError
from shared.messages.control import WorkerCapacity
from shared.messages.fingerprint import Fingerprint
from shared.messages.steps import RefusedRow, StepPlan, StepResult


class Found(msgspec.Struct, frozen=True):
    """What comes of a step, most of it on its way to the host."""

    taken: Taken
    scores: SampledScores | None
    prompt_scores: dict[int, Scored]  # by entry
    embeddings: dict[int, Tensor]  # by entry: [hidden_size] float32
    refused: dict[int, str]  # by entry


class ModelRunner:
    """Applies plans in order.  A row on which scheduler and worker disagree is refused, and the others go on; a
    FatalError means that a plan is none."""

    def __init__(
        self,
        *,
        model: Model,
        pool: KVPool,
        table: RowTable,
        sampler: Sampler,
        verification: Verification,
        capacity: WorkerCapacity,
        automata: RowAutomata | None = None,
        fingerprint: Fingerprint | None = None,
        lack: str = "",
    ) -> None:
        """`fingerprint`: what it computes with; `lack`: why that is torch where native kernels would be faster."""
        self.capacity = capacity
        self.fingerprint = fingerprint
        self.lack = lack
        self._model = model
        self._pool = pool
        self._table = table
        self._sampler = sampler
        self._verification = verification
        self._automata = RowAutomata(without_vocabulary) if automata is None else automata
        self._pools = RowPools()
        self._settlement = Settlement(table)
        self._fence = BlockFence(table.num_rows, pool.num_blocks, pool.block_size)

    def reset(self) -> None:
        """Forget all rows: a new epoch begins, and its scheduler will admit everything again."""
        self._table.reset()
        self._automata.reset()
        self._pools.reset()
        self._settlement.clear()
        self._fence.reset()

    def holdings(self) -> tuple[list[int], list[int]]:
        """The rows in use, and a digest of the blocks of each, as of the plan that was launched last."""
        return self._fence.holdings()

    def run(self, plan: StepPlan) -> StepResult:
        """What contradicts a row's state is refused, that row alone; raises FatalError on what no scheduler says."""
        return self.launch(plan).finish()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Answer:
        """The same, but on a GPU its end is not waited for."""
        clock = start_clock(self._model.device)
        whole, fenced = self._read(plan, self._apply(plan))
        if whole is None:
            return Answer(partial(_empty_result, plan, fenced), clock)
        held = HeldStep(self._automata, whole)
        hidden = self._model.forward(held.schedule.batch)
        schedule, lack = held.hold()
        prompt_scores = self._prompt_scores(schedule, hidden) if len(schedule.scored) else {}
        embeddings = self._pools.take(schedule, hidden) if len(schedule.pooled) else {}
        taken, scores = self._sample(schedule, hidden, lack)
        self._commit(schedule, taken, lack)
        held.advance(taken, lack)
        found = Found(taken, scores, prompt_scores, embeddings, {} if lack is None else lack.refused)
        return Answer(partial(_result, plan, fenced, found), clock)

    def _read(self, plan: StepPlan, fenced: list[RefusedRow]) -> tuple[Schedule | None, list[RefusedRow]]:
        """What is to be computed, if anything is, and all entries that are not."""
        part = without(plan, {one.entry for one in fenced}) if fenced else plan
        if not part.rows:
            return None, fenced
        self._settlement.settle(part.rows)
        try:
            return read_schedule(cut_drafts(part, self._automata), self._table), fenced
        except RowsOutOfStep as error:
            more = [self._fence.refuse(plan, plan.rows.index(row)) for row in error.rows]
            return self._read(plan, [*fenced, *more])

    def _apply(self, plan: StepPlan) -> list[RefusedRow]:
        """The plan's changes of state, but for the entries that are returned: they would touch what is not theirs."""
        self._check_copies(plan.block_copies)
        self._table.release(plan.released_rows)
        self._pools.release(plan.released_rows)
        self._automata.release(plan.released_rows)
        first_computed = dict(zip(plan.rows, plan.num_computed_tokens, strict=True))
        for sequence in plan.admitted:
            self._table.admit(sequence, first_computed.get(sequence.row, 0))
            self._automata.admit(sequence)
            self._pools.admit(sequence)
        self._settlement.drop([*plan.released_rows, *(sequence.row for sequence in plan.admitted)])
        self._table.append_blocks(plan.rows, plan.num_new_blocks, plan.new_block_ids)
        self._table.flush()
        fenced = self._fence.read(plan)
        self._pool.copy_blocks(self._fence.keeps(plan, fenced) if fenced else plan.block_copies)
        return fenced

    def _check_copies(self, copies: list[tuple[int, int]]) -> None:
        if any(not 0 <= block < self._pool.num_blocks for pair in copies for block in pair):
            raise FatalError(f"plan copies a block outside the pool of {self._pool.num_blocks}: {copies}")

    def _sample(
        self,
        schedule: Schedule,
        hidden: Tensor,  # [sum of wanted, hidden_size]
        lack: Lack | None,
    ) -> tuple[Taken, SampledScores | None]:
        batch, columns = schedule.positions, self._table.columns
        if len(batch.rows) == 0:
            return Taken(schedule, lack, torch.empty(0, dtype=torch.int64), None), None
        if len(schedule.scored) or len(schedule.pooled):
            hidden = hidden[to_device(schedule.sampled_places(), hidden.device)]
        if np.count_nonzero(columns.plain[batch.rows]) == len(batch.rows):
            return self._take_likeliest(schedule, hidden, lack), None
        logits = self._model.logits(hidden)
        asked = np.flatnonzero(columns.logprobs[batch.rows] != NO_LOGPROBS)
        raw = logits[to_device(asked, logits.device)] if len(asked) else None
        if schedule.drafts is None:
            taken = Taken(schedule, lack, self._sampler.sample(logits, batch), None)
        else:
            verdict = self._verification.verify(logits, batch, schedule.drafts)
            taken = Taken(schedule, lack, verdict.tokens, verdict)
        return taken, None if raw is None else self._score_sampled(raw, asked, batch.rows, taken)

    def _take_likeliest(
        self,
        schedule: Schedule,
        hidden: Tensor,  # [num_positions, hidden_size]
        lack: Lack | None,
    ) -> Taken:
        chosen = self._model.greedy(hidden)
        if schedule.drafts is None:
            return Taken(schedule, lack, chosen, None)
        verdict = self._verification.settle(chosen, schedule.positions, schedule.drafts)
        return Taken(schedule, lack, verdict.tokens, verdict)

    def _score_sampled(
        self,
        raw: Tensor,  # [num_asked, vocab_size]
        asked: Ints,  # [num_asked] positions
        rows: Ints,  # [num_positions]
        taken: Taken,
    ) -> SampledScores:
        """Where it is not known yet which positions come out, of all that may."""
        if taken.is_known and not (comes_out := np.isin(asked, taken.outcome.places)).all():
            raw, asked = raw[to_device(np.flatnonzero(comes_out), raw.device)], asked[comes_out]
        tokens = taken.tokens[to_device(asked, taken.tokens.device)].to(raw.device)
        counts = self._table.columns.logprobs[rows[asked]]
        return SampledScores(asked, score_rows(raw.__getitem__, tokens, counts, raw.shape[1]))

    def _commit(self, schedule: Schedule, taken: Taken, lack: Lack | None) -> None:
        """What the step computed and took belongs to the rows."""
        table, batch = self._table, schedule.batch
        rows, samples = batch.rows[schedule.samples], None
        table.num_computed[batch.rows] = batch.computed + batch.scheduled
        if lack is not None:
            table.hold_back(rows[lack.samples])
            samples = np.delete(np.arange(len(rows)), lack.samples)
            rows = rows[samples]
        if schedule.drafts is not None:
            self._commit_drafts(schedule.drafts, taken, rows, samples)
        else:
            table.append_tokens(rows, taken.tokens if samples is None else _pick(taken.tokens, samples))

    def _commit_drafts(self, drafts: Drafts, taken: Taken, rows: Ints, samples: Ints | None) -> None:
        """`samples` are those of the rows, where some are left out.  What a device has verified is written there
        already; of rows without drafts it is known how long they are."""
        chosen = slice(None) if samples is None else samples
        counts = drafts.counts[chosen]
        if taken.is_known and (accepted := taken.outcome.accepted) is not None:
            self._table.keep_drafts(rows, counts, accepted[chosen])
            self._table.append_tokens(rows, _pick(taken.tokens, (drafts.starts + accepted)[chosen]))
            return
        later = counts > 0
        places = np.arange(len(drafts.counts))[chosen]
        self._table.num_tokens[rows[~later]] += 1
        self._settlement.put_off(rows[later], places[later], counts[later], taken)

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
            found[entry] = score_rows(partial(self._logits_of, states), targets, asked, self._table.vocab_size)
        return found

    def _logits_of(
        self,
        states: Tensor,  # [n, hidden_size]
        rows: slice,
    ) -> Tensor:  # [number of rows, vocab_size] float32
        return self._model.logits(states[rows])


def _result(plan: StepPlan, fenced: list[RefusedRow], found: Found, seconds: float) -> StepResult:
    """Once the step is over."""
    taken = found.taken
    result = StepResult(
        epoch=plan.epoch,
        step_id=plan.step_id,
        num_sampled=taken.counts,
        sampled_token_ids=taken.token_ids,
        logprobs=[] if found.scores is None else found.scores.read(taken.outcome),
        prompt_logprobs={entry: scored.read() for entry, scored in found.prompt_scores.items()},
        device_time=seconds,
        refused=found.refused,
        embeddings={entry: vector.numpy().astype("<f4").tobytes() for entry, vector in found.embeddings.items()},
    )
    return completed(result, fenced, len(plan.rows)) if fenced else result


def _empty_result(plan: StepPlan, fenced: list[RefusedRow], seconds: float) -> StepResult:
    """Of a step that computed nothing."""
    result = StepResult(
        epoch=plan.epoch,
        step_id=plan.step_id,
        num_sampled=[],
        sampled_token_ids=[],
        logprobs=[],
        prompt_logprobs={},
        device_time=seconds if plan.rows else 0.0,
    )
    return completed(result, fenced, len(plan.rows)) if fenced else result


def _pick(
    tokens: Tensor,  # [num_positions] int64
    positions: Ints,  # [n]
) -> Tensor:  # [n] int64
    if tokens.device.type == "cpu":
        return torch.from_numpy(tokens.numpy()[positions])
    return tokens[to_device(positions, tokens.device)]


def without_vocabulary(eos_token_ids: Sequence[int]) -> Vocabulary:
    """For a runner that was not told of one."""
    raise GrammarError("is not possible: this worker has no tokenizer")
