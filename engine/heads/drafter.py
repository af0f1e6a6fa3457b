"""Drafts for the rows of a worker: after each step the head computes what the step did, and goes on alone.

The head's keys and values are a part of the target's blocks: they are cached, copied and moved with them.  Only what it
drafts ahead may need blocks that a row does not have yet, so each row has a few of its own.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from engine.execution.tables.rows import RowTable
from engine.heads.model import HeadModel
from engine.heads.native import NativeHead
from engine.modeling.batch import Ints, StepBatch
from engine.modeling.kv_pool import KVPool
from engine.sampling.processing import SampleBatch
from engine.sampling.sampler import Sampler
from kernels.ops.steps.transfer import to_device


class HeadDrafter:
    """Invariant: behind each step, of the tokens that a row has computed the head has computed those whose successor is
    known, with what the target computed of them.

    Of a cached prefix it has them too.  The last one of the last cached block was computed for the successor that it
    had in the sequence which computed it first: one key and value of many, which drafts may be a little worse for.
    """

    def __init__(self, head: HeadModel, table: RowTable, sampler: Sampler, *, num_blocks: int, most: int) -> None:
        """`num_blocks`: of the target's pool; `most`: drafts of a sequence."""
        self.captures = head.spec.captures
        self.most = most
        self._head = head
        self._at_once = head if isinstance(head, NativeHead) else None
        self._sampler = sampler
        self._table = table
        size = table.block_size
        self._num_own = 1 + -(-most // size)  # blocks of each row
        own = num_blocks + np.arange(table.num_rows * self._num_own).reshape(table.num_rows, self._num_own)
        self._own: Ints = own.astype(np.int64)
        width = -(-table.max_model_len // size)
        self._tables: Ints = np.zeros((table.num_rows, width + self._num_own), np.int64)
        self._width = width
        pool = head.layers.allocate(num_blocks + own.size, size)
        self._shared = [tensor[:num_blocks] for tensor in pool.tensors]

    @staticmethod
    def block_bytes(head: HeadModel, block_size: int) -> int:
        """That a block of the target's pool has more."""
        return sum(head.layers.layer_bytes(block_size))

    def join(self, pool: KVPool) -> None:
        """Have the head's part of each block be treated as the target's own."""
        pool.tensors = (*pool.tensors, *self._shared)

    def follow(
        self,
        batch: StepBatch,
        captured: Tensor,  # [num_tokens of the batch, head.spec.captured_size]
        wanted: Ints,  # [num_seqs] drafts
        *,
        is_certain: bool = False,
    ) -> tuple[list[int], list[int]]:  # drafts of each sequence, and all of them one after the other
        """Once the rows have the step's tokens.  Drafts are drawn as tokens will be, with the same noise; the likeliest
        where they are to be certain, because acceptance needs noise that has nothing to do with them."""
        table, rows = self._table, batch.rows
        known = np.minimum(table.num_computed[rows], table.num_tokens[rows] - 1)
        counts = np.clip(known - batch.computed, 0, batch.scheduled)
        is_asked = (table.num_tokens[rows] == batch.computed + counts + 1) & (counts > 0)
        ends = batch.computed + counts
        wanted = np.where(is_asked, np.minimum(np.minimum(wanted, self.most), table.max_model_len - ends), 0)
        self._copy_tables(rows, int(ends.max()) if len(ends) else 0)
        entries = np.flatnonzero(counts)
        if not len(entries):
            return [0] * len(rows), []
        asking = wanted > 0
        columns, starts = table.columns, (np.cumsum(batch.scheduled) - batch.scheduled)[entries]
        is_certain |= bool(columns.plain[rows[asking]].all())
        part = self._batch(rows[entries], batch.computed[entries], counts[entries], asking[entries].astype(np.int64))
        if self._at_once is not None and (is_certain or not columns.altered[rows[asking]].any()):
            drawing = None if is_certain else columns
            return wanted.tolist(), self._at_once.draft(part, captured, starts, wanted[entries], drawing).tolist()
        state = self._read(part, captured, starts)
        drafts = self._go_on(state, rows[asking], ends[asking], wanted[asking], is_certain=is_certain)
        each = [drafts[:count, place].tolist() for place, count in enumerate(wanted[asking].tolist())]
        return wanted.tolist(), [token for tokens in each for token in tokens]

    def _copy_tables(self, rows: Ints, longest: int) -> None:
        """The rows' blocks, and behind them those of their own."""
        used = min(self._width, longest // self._table.block_size + 1 + self._num_own)
        self._tables[rows, :used] = self._table.block_tables[rows, :used]
        places = self._table.num_blocks[rows][:, None] + np.arange(self._num_own)
        self._tables[rows[:, None], places] = self._own[rows]

    def _read(self, part: StepBatch, captured: Tensor, starts: Ints) -> Tensor:
        """The head's state behind the last token of each sequence that wants drafts; `starts`: rows of `captured`."""
        counted = part.scheduled
        offsets = np.arange(counted.sum()) - np.repeat(np.cumsum(counted) - counted, counted)
        rows, positions = np.repeat(part.rows, counted), np.repeat(part.computed, counted) + offsets
        tokens = self._table.tokens
        where = to_device(np.stack((np.repeat(starts, counted) + offsets, rows, positions)), tokens.device)
        token_ids = tokens[where[1], where[2] + 1]
        return self._head.run(part, token_ids, where[2], self._head.read(captured[where[0]]))

    def _go_on(
        self, state: Tensor, rows: Ints, ends: Ints, wanted: Ints, *, is_certain: bool
    ) -> Ints:  # [longest, number that want drafts]
        """One draft after the other; they stand behind the rows' tokens, where sampling sees them."""
        if not len(rows):
            return np.zeros((0, 0), np.int64)
        drafts = np.zeros((int(wanted.max()), len(rows)), np.int64)
        going = np.arange(len(rows))
        for turn in range(len(drafts)):
            normed, hidden = self._head.finish(state)
            lengths = ends[going] + 1 + turn
            token_ids = self._head.greedy(normed) if is_certain else self._drawn(normed, rows[going], lengths)
            drafts[turn, going] = token_ids.cpu().numpy()
            left = np.flatnonzero(wanted[going] > turn + 1)
            if not len(left):
                break
            if not is_certain:
                self._table.write_drafts(rows[going], lengths, drafts[turn, going])
            going = going[left]
            chosen = to_device(left, hidden.device)
            places, ones = ends[going] + turn, np.ones(len(going), np.int64)
            part = self._batch(rows[going], places, ones, ones)
            positions = to_device(places, hidden.device)
            state = self._head.run(part, token_ids[chosen], positions, hidden[chosen])
        return drafts

    def _drawn(self, normed: Tensor, rows: Ints, lengths: Ints) -> Tensor:  # [n] int64
        table = self._table
        batch = SampleBatch(rows, lengths, table.tokens, table.columns)
        return self._sampler.sample(self._head.logits(normed, table.vocab_size), batch)

    def _batch(self, rows: Ints, computed: Ints, scheduled: Ints, wanted: Ints) -> StepBatch:
        table = self._table
        return StepBatch(rows, computed, scheduled, wanted, table.tokens, self._tables, table.block_size)
