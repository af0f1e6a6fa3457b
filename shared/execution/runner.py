"""The model runner: one plan in, one result out.

Public API: `ModelRunner.capacity` (what the scheduler is told), `.run(plan)`, `.reset()` at a new epoch.  Runs on one
thread and one stream; a plan's work starts after that of the plan before it, so a block freed by the scheduler after
result n may be written by plan n + 2 without a fence.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from kernels.ops.transfer import to_device
from shared.automata.limits import GrammarError
from shared.automata.vocabulary import Vocabulary
from shared.errors import FatalError
from shared.execution.answers import Answer, Clock, start_clock
from shared.execution.block_fence import BlockFence
from shared.execution.held_step import HeldStep, Lack, cut_drafts
from shared.execution.partial import completed, without
from shared.execution.pooling import RowPools
from shared.execution.row_automata import RowAutomata
from shared.execution.rows import RowsOutOfStep, RowTable
from shared.execution.schedule import Schedule, read_schedule
from shared.messages.control import WorkerCapacity
from shared.messages.steps import RefusedRow, StepPlan, StepResult, TokenLogprobs
from shared.modeling.batch import Ints
from shared.modeling.drafts import Drafts
from shared.modeling.kv_pool import KVPool
from shared.modeling.logprobs import gather_logprobs
from shared.modeling.model import Model
from shared.modeling.sampler import Sampler
from shared.modeling.sampling_columns import NO_LOGPROBS

PROMPT_LOGPROB_ROWS = 64  # prompt positions whose logits are held at a time


class Sampled(msgspec.Struct, frozen=True):
    """What a step's rows took: one token each, and before it the drafts that were accepted."""

    token_ids: Tensor  # [num_yielded] int64
    last: Tensor  # [num_samples] int64, on the device: the last of each row
    counts: Ints  # [num_entries] tokens of each
    places: Ints  # [num_yielded] their positions, among those that were sampled
    accepted: Ints | None  # [num_samples]; None where the step has no drafts

    def without(self, samples: Ints, lacking: Ints) -> Sampled:
        """`samples` [num_samples] are entries; those at the indices `lacking` yield nothing after all."""
        counts, stays = self.counts.copy(), np.ones(len(samples), np.bool_)
        stays[lacking] = False
        kept = np.repeat(stays, counts[samples])
        counts[samples[lacking]] = 0
        return Sampled(
            self.token_ids[torch.from_numpy(kept).to(self.token_ids.device)],
            self.last[torch.from_numpy(stays).to(self.last.device)],
            counts,
            self.places[kept],
            None if self.accepted is None else self.accepted[stays],
        )


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
        capacity: WorkerCapacity,
        automata: RowAutomata | None = None,
    ) -> None:
        self.capacity = capacity
        self._model = model
        self._pool = pool
        self._table = table
        self._sampler = sampler
        self._automata = RowAutomata(without_vocabulary) if automata is None else automata
        self._pools = RowPools()
        self._fence = BlockFence(table.num_rows, pool.num_blocks, pool.block_size)

    def reset(self) -> None:
        """Forget all rows: a new epoch begins, and its scheduler will admit everything again."""
        self._table.reset()
        self._automata.reset()
        self._pools.reset()
        self._fence.reset()

    def holdings(self) -> tuple[list[int], list[int]]:
        """The rows in use, and a digest of the blocks of each, as of the plan that was launched last."""
        return self._fence.holdings()

    def run(self, plan: StepPlan) -> StepResult:
        """What contradicts a row's state is refused, that row alone; raises FatalError on what no scheduler says."""
        return self.launch(plan).finish()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Answer:
        """The same, but on a GPU its end is not waited for, unless there are drafts or log-probabilities."""
        clock = start_clock(self._model.device)
        whole, fenced = self._read(plan, self._apply(plan))
        if whole is None:
            return self._answer(plan, fenced, clock, torch.empty(0, dtype=torch.int64), [], [], {}, {}, {})
        held = HeldStep(self._automata, whole)
        hidden = self._model.forward(held.schedule.batch)
        schedule, lack = held.hold()
        prompt_logprobs = self._prompt_logprobs(schedule, hidden) if len(schedule.scored) else {}
        embeddings = self._pools.take(schedule, hidden) if len(schedule.pooled) else {}
        sampled, logprobs = self._sample(schedule, hidden, lack)
        self._commit(schedule, sampled, lack)
        held.advance(sampled.token_ids, sampled.counts[schedule.samples], lack)
        refused = {} if lack is None else lack.refused
        return self._answer(
            plan,
            fenced,
            clock,
            sampled.token_ids,
            sampled.counts.tolist(),
            logprobs,
            prompt_logprobs,
            refused,
            embeddings,
        )

    def _read(self, plan: StepPlan, fenced: list[RefusedRow]) -> tuple[Schedule | None, list[RefusedRow]]:
        """What is to be computed, if anything is, and all entries that are not."""
        part = without(plan, {one.entry for one in fenced}) if fenced else plan
        if not part.rows:
            return None, fenced
        try:
            return read_schedule(cut_drafts(part, self._automata), self._table), fenced
        except RowsOutOfStep as error:
            more = [self._fence.refuse(plan, plan.rows.index(row)) for row in error.rows]
            return self._read(plan, [*fenced, *more])

    def _answer(
        self,
        plan: StepPlan,
        fenced: list[RefusedRow],
        clock: Clock,
        token_ids: Tensor,  # [num_yielded] int64
        num_sampled: list[int],
        logprobs: list[TokenLogprobs | None],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
        refused: dict[int, str],
        embeddings: dict[int, bytes],
    ) -> Answer:
        def make_result(token_ids: list[int], seconds: float) -> StepResult:
            result = StepResult(
                epoch=plan.epoch,
                step_id=plan.step_id,
                num_sampled=num_sampled,
                sampled_token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                device_time=seconds if plan.rows else 0.0,
                refused=refused,
                embeddings=embeddings,
            )
            return completed(result, fenced, len(plan.rows)) if fenced else result

        return Answer(token_ids, make_result, clock)

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
    ) -> tuple[Sampled, list[TokenLogprobs | None]]:
        batch, columns = schedule.positions, self._table.columns
        if len(batch.rows) == 0:
            return _take_all(schedule, torch.empty(0, dtype=torch.int64)), []
        if len(schedule.scored) or len(schedule.pooled):
            hidden = hidden[to_device(schedule.sampled_places(), hidden.device)]
        if np.count_nonzero(columns.plain[batch.rows]) == len(batch.rows):
            return self._take_likeliest(schedule, hidden), []
        logits = self._model.logits(hidden)
        asked = np.flatnonzero(columns.logprobs[batch.rows] != NO_LOGPROBS)
        raw = logits[to_device(asked, logits.device)] if len(asked) else None
        if schedule.drafts is None:
            sampled = _take_all(schedule, self._sampler.sample(logits, batch))
        else:
            tokens, accepted = self._sampler.verify(logits, batch, schedule.drafts)
            sampled = _take_verified(schedule, schedule.drafts, tokens, accepted)
        if lack is not None:
            sampled = sampled.without(schedule.samples, lack.samples)
        return sampled, [] if raw is None else self._score_sampled(raw, asked, batch.rows, sampled)

    def _take_likeliest(
        self,
        schedule: Schedule,
        hidden: Tensor,  # [num_positions, hidden_size]
    ) -> Sampled:
        chosen, drafts = self._model.greedy(hidden), schedule.drafts
        if drafts is None:
            return _take_all(schedule, chosen)
        tokens = chosen.cpu().numpy()
        return _take_verified(schedule, drafts, tokens, drafts.num_accepted(drafts.equal(tokens)))

    def _score_sampled(
        self,
        raw: Tensor,  # [num_asked, vocab_size]
        asked: Ints,  # [num_asked] positions
        rows: Ints,  # [num_positions]
        sampled: Sampled,
    ) -> list[TokenLogprobs | None]:  # num_yielded
        taken = np.isin(asked, sampled.places)
        if not taken.all():
            raw, asked = raw[to_device(taken, raw.device)], asked[taken]
        places = sampled.places.searchsorted(asked)
        chosen = sampled.token_ids[torch.from_numpy(places)].to(raw.device)
        scored: list[TokenLogprobs | None] = [None] * len(sampled.places)
        counts = self._table.columns.logprobs[rows[asked]]
        for place, found in zip(places, gather_logprobs(raw, chosen, counts), strict=True):
            scored[place] = TokenLogprobs(*found)
        return scored

    def _commit(self, schedule: Schedule, sampled: Sampled, lack: Lack | None) -> None:
        """What the step computed and took belongs to the rows."""
        table, batch, drafts = self._table, schedule.batch, schedule.drafts
        rows = batch.rows[schedule.samples]
        counts = drafts.counts if drafts is not None else None
        table.num_computed[batch.rows] = batch.computed + batch.scheduled
        if lack is not None:
            table.hold_back(rows[lack.samples])
            rows = np.delete(rows, lack.samples)
            counts = np.delete(counts, lack.samples) if counts is not None else None
        if counts is not None and sampled.accepted is not None:
            table.keep_drafts(rows, counts, sampled.accepted)
        table.append_tokens(rows, sampled.last)

    def _prompt_logprobs(
        self,
        schedule: Schedule,
        hidden: Tensor,  # [sum of wanted, hidden_size]
    ) -> dict[int, list[TokenLogprobs]]:
        """For each scored entry: of the prompt's tokens that follow one computed in this step."""
        columns, batch = self._table.columns, schedule.batch
        starts = np.cumsum(batch.wanted) - batch.wanted
        found: dict[int, list[TokenLogprobs]] = {}
        for entry in schedule.scored.tolist():
            row, first = int(batch.rows[entry]), int(batch.computed[entry]) + 1
            count = min(int(batch.scheduled[entry]), int(columns.num_prompt[row]) - first)
            start = int(starts[entry])
            targets = self._table.tokens[row, first : first + count]
            found[entry] = self._score(hidden[start : start + count], targets, int(columns.prompt_logprobs[row]))
        return found

    def _score(
        self,
        hidden: Tensor,  # [n, hidden_size]
        targets: Tensor,  # [n] int64
        count: int,
    ) -> list[TokenLogprobs]:
        scored: list[TokenLogprobs] = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            states = hidden[start : start + PROMPT_LOGPROB_ROWS]
            tokens = targets[start : start + PROMPT_LOGPROB_ROWS]
            positions = gather_logprobs(self._model.logits(states), tokens, np.full(len(tokens), count))
            scored += [TokenLogprobs(*position) for position in positions]
        return scored


def without_vocabulary(eos_token_ids: Sequence[int]) -> Vocabulary:
    """For a runner that was not told of one."""
    raise GrammarError("is not possible: this worker has no tokenizer")


def _take_all(
    schedule: Schedule,
    chosen: Tensor,  # [num_samples] int64
) -> Sampled:
    return Sampled(chosen, chosen, schedule.num_positions, np.arange(len(chosen)), None)


def _take_verified(schedule: Schedule, drafts: Drafts, tokens: Ints, accepted: Ints) -> Sampled:
    """Of the positions' tokens [num_positions] those up to the one behind the accepted drafts [num_samples]."""
    counts = schedule.num_positions.copy()
    counts[schedule.samples] = accepted + 1
    places = drafts.yielded(accepted)
    last = torch.from_numpy(tokens[drafts.starts + accepted]).to(schedule.batch.tokens.device)
    return Sampled(torch.from_numpy(tokens[places]), last, counts, places, accepted)
