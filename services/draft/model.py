"""A draft model as a proposer.

It has weights, a KV pool and block tables of its own.  So one draft serves several workers, each with another
numbering of blocks; its state of a sequence survives that sequence's preemption; and the scheduler need not send
blocks, copies or prefixes.  The keys and values of guessed tokens are written to its pool too: where the target
disagrees, the row is computed again from there.

It samples with the target's noise, seeds and parameters: the guess is what the target would sample with this model.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.loading.load import LoadedModel
from engine.modeling.batch import Ints, StepBatch
from engine.modeling.model import Extends
from engine.sampling.processing import SampleBatch
from engine.sampling.proposals import certain
from services.draft.ending import read_ending
from services.draft.followed import Followed
from services.draft.proposer import Guess
from shared.errors import FatalError, ProtocolError
from shared.messages import AdmittedSequence, DraftCapacity, DraftDistribution
from shared.requests.sampling import GREEDY_EPSILON

NONE: list[DraftDistribution] = []
MOST_AT_ONCE = 8  # tokens of one call: updates that come meanwhile wait for its end
NEAR = 16  # tokens to read, with which a sequence is still computed beside those that only guess
MOST_TOKENS = 512  # of one forward pass: updates that come meanwhile wait for its end


class ModelProposer:
    """A `services.draft.proposer.Proposer`.

    Invariant: a row's keys and values are computed of fewer tokens than it has, and are those of its tokens as they
    are, guess included; a block is held by one row, or free.
    """

    def __init__(self, loaded: LoadedModel, *, name: str) -> None:
        self._model = loaded.model
        self._table = loaded.table
        on_host = loaded.model.device.type == "cpu"
        self._host_tokens: Ints | None = loaded.table.tokens.numpy() if on_host else None  # the same memory
        self._sampler = loaded.sampler
        self._num_blocks = loaded.plan.num_blocks
        self._free = list(range(self._num_blocks))
        self._followed: dict[int, Followed] = {}
        self.capacity = DraftCapacity(
            num_rows=loaded.table.num_rows,
            max_model_len=loaded.plan.max_model_len,
            vocab_size=loaded.model.spec.vocab_size,
            model=name,
        )

    # -- updates

    def reset(self) -> None:
        self._table.reset()
        self._followed.clear()
        self._free = list(range(self._num_blocks))

    def open(self, sequence: AdmittedSequence) -> None:
        """A sequence that is too long already is followed, but nothing is guessed for it."""
        num_tokens = len(sequence.token_ids) // 4
        if num_tokens <= self._table.max_model_len:
            try:
                self._table.admit(_without_logprobs(sequence), 0)
            except FatalError as error:
                raise ProtocolError(str(error)) from error
        ending = read_ending(sequence, self._table.max_model_len)
        self._followed[sequence.row] = Followed(ending, num_tokens)

    def close(self, row: int) -> None:
        self._give_back(row, self._followed.pop(row))
        self._table.release([row])

    def commit(self, row: int, token_ids: list[int]) -> None:
        followed = self._followed[row]
        followed.is_blocked = False
        confirmed = followed.num_confirmed(token_ids)
        followed.confirm(confirmed)
        if confirmed < len(token_ids):
            self._correct(row, followed, token_ids[confirmed:])

    def _correct(self, row: int, followed: Followed, token_ids: list[int]) -> None:
        """Committed tokens that differ from the guess replace it."""
        table = self._table
        if min(token_ids) < 0 or max(token_ids) >= self.capacity.vocab_size:
            raise ProtocolError(f"row {row} gets a token outside the vocabulary of {self.capacity.vocab_size}")
        start = followed.num_told
        followed.correct(len(token_ids))
        end = followed.num_told
        if end > table.max_model_len:
            self._give_back(row, followed)
            return
        if self._host_tokens is not None:
            self._host_tokens[row, start:end] = token_ids
        else:
            table.tokens[row, start:end] = torch.tensor(token_ids)
        table.num_tokens[row] = end
        table.num_computed[row] = min(int(table.num_computed[row]), start)

    # -- guesses

    def finished(self, row: int, goal: int) -> bool:
        followed = self._followed[row]
        return len(followed.guess) >= goal or followed.is_blocked or followed.is_over

    def is_behind(self, row: int) -> bool:
        return int(self._table.num_tokens[row] - self._table.num_computed[row]) > NEAR

    def guess(self, row: int, count: int) -> Guess:
        followed = self._followed[row]
        return Guess(followed.guess[:count], followed.distributions[:count])

    @torch.inference_mode()
    def propose(self, goals: Mapping[int, int], rejection: bool) -> int:
        """The next token of every row whose committed tokens are computed, or a chunk for the rows behind; a few tokens
        at once where the model can."""
        batch = self._plan(goals)
        if batch is None:
            return 1
        if count := self._chain_length(batch, goals, rejection):
            self._extend(batch, count, rejection)
            return count
        hidden = self._model.forward(batch)
        self._table.num_computed[batch.rows] = batch.computed + batch.scheduled
        rows = batch.rows[batch.wanted > 0]
        if len(rows):
            token_ids, distributions = self._draw(hidden, rows, rejection)
            self._append(rows, token_ids, distributions)
        return 1

    def _chain_length(self, batch: StepBatch, goals: Mapping[int, int], rejection: bool) -> int:
        """How many tokens all rows of a batch can be given in one call; 0 where they have to be sampled here."""
        columns = self._table.columns
        if not isinstance(self._model, Extends) or (rejection and not columns.plain[batch.rows].all()):
            return 0
        if not (columns.bare[batch.rows].all() and batch.wanted.all()):
            return 0
        return min(MOST_AT_ONCE, *(self._num_lacking(row, goals[row]) for row in batch.rows.tolist()))

    def _num_lacking(self, row: int, goal: int) -> int:
        followed = self._followed[row]
        num_guessed = len(followed.guess)
        return min(goal, followed.ending.max_length - followed.num_told) - num_guessed

    def _extend(self, batch: StepBatch, count: int, rejection: bool) -> None:
        table, rows = self._table, batch.rows
        drawn = table.columns.temperature[rows] >= GREEDY_EPSILON
        temperature = np.where(drawn, table.columns.temperature[rows], 0.0)
        assert isinstance(self._model, Extends)
        token_ids = self._model.extend(batch, count, temperature, table.columns.seeds[rows])
        lengths = batch.computed + batch.scheduled
        for row, length, column in zip(rows.tolist(), lengths.tolist(), token_ids.T.tolist(), strict=True):
            followed, num_taken = self._followed[row], 0
            while num_taken < count and not followed.is_over:
                followed.go_on(column[num_taken], [certain(column[num_taken])] if rejection else NONE)
                num_taken += 1
            table.num_tokens[row] = length + num_taken
            table.num_computed[row] = length + num_taken - 1

    def _plan(self, goals: Mapping[int, int]) -> StepBatch | None:
        table = self._table
        able = [row for row, goal in goals.items() if not self.finished(row, goal) and self._reserve(row, goal)]
        if not able:
            return None
        rows = np.array(able, np.int64)
        lengths, computed = table.num_tokens[rows], table.num_computed[rows]
        scheduled = share_out(lengths - computed)
        chosen = scheduled > 0
        if np.count_nonzero(chosen) < len(rows):
            rows, lengths, computed, scheduled = (column[chosen] for column in (rows, lengths, computed, scheduled))
        wanted = (computed + scheduled == lengths).astype(np.int64)
        return StepBatch(rows, computed, scheduled, wanted, table.tokens, table.block_tables, table.block_size)

    def _reserve(self, row: int, goal: int) -> bool:
        """Blocks for all committed and wanted tokens.  Where there are not enough, a row without any guess frees its
        blocks for other rows; it is computed again once blocks are free."""
        followed, table = self._followed[row], self._table
        length = min(followed.num_told + goal, followed.ending.max_length)
        num_new = -(-length // table.block_size) - len(followed.block_ids)
        if num_new <= 0:
            return True
        if num_new > len(self._free):
            followed.is_blocked = True
            if not followed.guess:
                self._give_back(row, followed)
            return False
        new = [self._free.pop() for _ in range(num_new)]
        followed.block_ids += new
        table.append_blocks([row], [num_new], new)
        return True

    def _give_back(self, row: int, followed: Followed) -> None:
        self._free += followed.block_ids
        followed.block_ids.clear()
        self._table.num_blocks[row] = 0
        self._table.num_computed[row] = 0

    def _draw(
        self,
        hidden: Tensor,  # [n, hidden_size]
        rows: Ints,  # [n]
        rejection: bool,
    ) -> tuple[Tensor, list[DraftDistribution]]:  # token ids [n] int64, and what they were drawn from, or nothing
        columns = self._table.columns
        if np.count_nonzero(columns.plain[rows]) == len(rows):
            token_ids = self._model.greedy(hidden)
            return token_ids, [certain(token_id) for token_id in token_ids.tolist()] if rejection else []
        logits = self._model.logits(hidden)
        batch = SampleBatch(rows, self._table.num_tokens[rows], self._table.tokens, columns)
        if rejection:
            return self._sampler.propose(logits, batch)
        return self._sampler.sample(logits, batch), []

    def _append(
        self,
        rows: Ints,  # [n]
        token_ids: Tensor,  # [n] int64
        distributions: list[DraftDistribution],  # n, or none
    ) -> None:
        self._table.append_tokens(rows, token_ids)
        for place, (row, token_id) in enumerate(zip(rows.tolist(), token_ids.tolist(), strict=True)):
            self._followed[row].go_on(token_id, distributions[place : place + 1])


def share_out(
    behind: Ints,  # [n] tokens that each row has yet to read, at least one each
) -> Ints:  # [n] tokens of the next forward
    """Those that are near first, and alone; of the others the nearest first.  MOST_TOKENS in all."""
    near = behind <= NEAR
    if near.any():
        behind = behind * near
    if int(behind.sum()) <= MOST_TOKENS:
        return behind
    order = np.argsort(behind, kind="stable")
    left = MOST_TOKENS - (np.cumsum(behind[order]) - behind[order])
    shared = np.zeros_like(behind)
    shared[order] = np.clip(left, 0, behind[order])
    return shared


def _without_logprobs(sequence: AdmittedSequence) -> AdmittedSequence:
    """A draft returns no log-probabilities, and the most likely token is cheaper without them."""
    params = msgspec.structs.replace(sequence.params, logprobs=None, prompt_logprobs=None)
    return msgspec.structs.replace(sequence, params=params)
