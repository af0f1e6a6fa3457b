"""The worker's state of each row: its tokens, its block table, its sampling parameters.

Soft state: all of it came in plans, and the scheduler can send it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.adapters import UNKNOWN, AdapterBank
from engine.execution.tables.device_tables import DeviceTables
from engine.execution.tables.row_states import RowStates
from engine.modeling.batch import Ints
from engine.modeling.kv_pool import Sliding
from engine.sampling.columns import SamplingColumns
from kernels.ops.linears.lora import NO_ADAPTER
from kernels.ops.steps.transfer import to_device
from shared.errors import FatalError
from shared.messages.steps import AdmittedSequence


class RowsOutOfStep(FatalError):
    """Rows whose state contradicts the plan: they must not be computed; other rows are not affected."""

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class RowTable:
    """Fixed arrays over all rows.  Tokens stay on the device, where a sampled one is appended unseen by the host.

    Invariant: a row's first num_tokens tokens are its history, and its first num_computed have their keys and
    values in its blocks, or will once the steps already launched have run.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        device: torch.device,
        device_tables: DeviceTables | None = None,
        sliding: Sliding = (),
        states: RowStates | None = None,
        adapters: AdapterBank | None = None,
    ) -> None:
        """`states`: of models whose layers keep some."""
        self.num_rows = num_rows
        self.states = states
        self.max_model_len = max_model_len
        self.block_size = block_size
        self._pool_blocks = [num_blocks, *(count for _, count in sliding)]
        self._windows = np.array([window for window, _ in sliding], dtype=np.int64)[:, None]
        self.vocab_size = vocab_size
        self.tokens: Tensor = torch.zeros(num_rows, max_model_len + 1, dtype=torch.int64, device=device)
        self._host_tokens: Ints | None = self.tokens.numpy() if device.type == "cpu" else None  # the same memory
        self._width = -(-max_model_len // block_size)
        num_pools = len(self._pool_blocks)
        self.block_tables: Ints = np.zeros((num_rows, num_pools * self._width), dtype=np.int64)  # beside each other
        self._device_tables = device_tables
        self._firsts: Ints = np.zeros((num_pools, num_rows), dtype=np.int64)  # the place of each table's first block
        self._ends: Ints = np.zeros((num_pools, num_rows), dtype=np.int64)  # the place behind its last one
        self.num_blocks: Ints = self._ends[0]
        self.num_tokens: Ints = np.zeros(num_rows, dtype=np.int64)  # 0: the row is not in use
        self.num_computed: Ints = np.zeros(num_rows, dtype=np.int64)
        self.lacks_sample: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # since its last step, or the one before
        self.columns = SamplingColumns(num_rows)
        self._bank = adapters
        self._adapters: dict[int, str] = {}  # digests, of the rows that have one

    def reset(self) -> None:
        """Forget every row."""
        self.num_tokens[:] = 0
        self._adapters.clear()
        self._firsts[:] = self._ends[:] = 0
        if self.states is not None:
            self.states.reset()

    def admit(self, sequence: AdmittedSequence, num_computed: int) -> None:
        """Replace whatever the row held.  `num_computed` tokens are in blocks that come with this plan."""
        row, count = sequence.row, len(sequence.token_ids) // 4
        self._check_row(row)
        if not 0 < count <= self.max_model_len:
            raise FatalError(f"row {row} is admitted with {count} tokens; max_model_len is {self.max_model_len}")
        token_ids = np.frombuffer(sequence.token_ids, dtype="<i4").astype(np.int64)
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= self.vocab_size:
            raise FatalError(f"row {row} is admitted with a token id outside the vocabulary of {self.vocab_size}")
        self.tokens[row, :count].copy_(to_device(token_ids, self.tokens.device), non_blocking=True)
        self.num_tokens[row] = count
        self.num_computed[row] = num_computed
        self.lacks_sample[row] = False
        self._firsts[:, row] = self._ends[:, row] = 0
        self._adapters.pop(row, None)
        if sequence.adapter:
            self._adapters[row] = sequence.adapter
        self.columns.fill(row, sequence.num_prompt_tokens, sequence.params, sequence.seed, sequence.eos_token_ids)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._check_row(row)
            self.num_tokens[row] = 0
            self._adapters.pop(row, None)
            self._firsts[:, row] = self._ends[:, row] = 0

    def leave_blocks(self, rows: Sequence[int], counts: Sequence[int], pool: int) -> None:
        """Empty the first `counts` places of the rows' tables in a sliding pool; then they are not read any more."""
        self._firsts[pool, rows] += np.array(counts, np.int64)
        self._ends[pool, rows] = np.maximum(self._ends[pool, rows], self._firsts[pool, rows])

    def append_blocks(
        self, rows: Sequence[int], counts: Sequence[int], block_ids: Sequence[int], pool: int = 0
    ) -> None:
        """Extend the rows' tables in one pool, `counts` blocks each."""
        if sum(counts) != len(block_ids):
            raise FatalError(f"plan has {len(block_ids)} new block ids for counts that sum to {sum(counts)}")
        if not block_ids:
            return
        if min(block_ids) < 0 or max(block_ids) >= self._pool_blocks[pool]:
            raise FatalError(f"plan names a block outside the pool of {self._pool_blocks[pool]}")
        start = 0
        for row, count in zip(rows, counts, strict=True):
            if count:
                self._extend(row, pool, block_ids[start : start + count])
                start += count

    def _extend(self, row: int, pool: int, block_ids: Sequence[int]) -> None:
        end = int(self._ends[pool, row]) + len(block_ids)
        if end > self._width:
            raise FatalError(f"row {row} is given {end} blocks, more than {self._width}")
        column = pool * self._width + end
        begin = column - len(block_ids)
        self.block_tables[row, begin:column] = block_ids
        if self._device_tables is not None:
            self._device_tables.stage(row, begin, block_ids)
        self._ends[pool, row] = end

    def adapters(self, rows: Ints) -> Ints | None:
        """Places of the rows' adapters as they are now, NO_ADAPTER or UNKNOWN; None where none has any."""
        if not self._adapters:
            return None
        find = self._bank.place_of if self._bank is not None else lambda digest: UNKNOWN if digest else NO_ADAPTER
        places = np.array([find(self._adapters.get(row, "")) for row in rows.tolist()], np.int64)
        return places if np.count_nonzero(places != NO_ADAPTER) else None

    def flush(self) -> None:
        """Copy to the device what was changed since the last step."""
        if self._device_tables is not None:
            self._device_tables.flush()

    def check_rows(self, rows: Sequence[int]) -> None:
        """Raise FatalError unless they are distinct rows of this table."""
        if rows and (len(set(rows)) != len(rows) or min(rows) < 0 or max(rows) >= self.num_rows):
            raise FatalError(f"plan's rows are not distinct rows below {self.num_rows}: {list(rows)}")

    def hold_back(self, rows: Ints) -> None:
        """These rows should have been sampled and were not: their last token is computed again, for its logits."""
        self.num_computed[rows] = self.num_tokens[rows] - 1
        self.lacks_sample[rows] = True
        if self.states is not None:
            self.states.put_back(rows, self.num_computed[rows])

    def excess(self, rows: Ints, computed: Ints) -> Ints | None:  # [num_entries], 0 or 1; None: nowhere any
        """By how much a plan is ahead: one that was in flight counts on the token of a row that was held back."""
        lacking = self.lacks_sample[rows]
        if not np.count_nonzero(lacking):
            return None
        ahead = lacking & (computed == self.num_computed[rows] + 1)
        self.lacks_sample[rows[~ahead]] = False
        excess: Ints = ahead.astype(np.int64)
        return excess

    def check_schedule(self, rows: Ints, computed: Ints, ends: Ints, drafts: Ints | None = None) -> Ints:
        """The rows' numbers of tokens.  `drafts` are the draft tokens of each row, counted in its end.

        Raises RowsOutOfStep unless the plan and this table agree on every row: the two must never drift apart.
        """
        held, lengths = self.num_computed[rows], self.num_tokens[rows]
        reach = lengths if drafts is None else lengths + drafts
        limit = np.minimum(reach, self._ends[:, rows].min(axis=0) * self.block_size)
        limit = np.minimum(limit, self.max_model_len)
        wrong = (computed != held) | (ends <= computed) | (ends > limit)
        if drafts is not None:
            wrong |= (drafts > 0) & ((ends != reach) | (computed >= lengths))
        if (adapters := self.adapters(rows)) is not None:
            wrong |= adapters == UNKNOWN
        if self.states is not None:
            wrong |= (stale := self.states.contradicts(rows, computed))
        if len(self._windows):  # what a window still sees must be there
            seen = np.maximum(computed - self._windows + 1, 0) // self.block_size
            wrong |= (self._firsts[1:, rows] > seen).any(axis=0)
        if np.count_nonzero(wrong):
            refused = rows[wrong].tolist()
            if adapters is not None:
                self._refuse(refused, rows, adapters == UNKNOWN, "adapter", adapters, adapters)
            self._refuse(refused, rows, computed != held, "num_computed_tokens", computed, held)
            if self.states is not None:
                self._refuse(refused, rows, stale, "num_computed_tokens", computed, self.states.due(rows))
            self._refuse(refused, rows, wrong, "planned end", ends, limit)
        return lengths

    def _refuse(
        self, refused: list[int], rows: Ints, wrong: NDArray[np.bool_], what: str, planned: Ints, held: Ints
    ) -> None:
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            raise RowsOutOfStep(
                f"row {rows[first]}: plan's {what} is {planned[first]}, the worker's own limit or count {held[first]}",
                refused,
            )

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.num_rows:
            raise FatalError(f"plan names row {row}; the worker has {self.num_rows}")

    def append_tokens(
        self,
        rows: Ints,  # [num_sampled], distinct
        token_ids: Tensor,  # [num_sampled] int64, on the device
    ) -> None:
        lengths = self.num_tokens[rows]
        if self._host_tokens is not None:
            self._host_tokens[rows, lengths] = token_ids.numpy()
        elif len(rows):
            where = to_device(np.stack((rows, lengths)), self.tokens.device)
            self.tokens[where[0], where[1]] = token_ids
        self.num_tokens[rows] = lengths + 1

    def write_drafts(
        self,
        rows: Ints,  # [num_drafts]
        places: Ints,  # [num_drafts] behind the tokens of each row
        token_ids: Ints,  # [num_drafts]
    ) -> None:
        """Where a step reads them; they are not the rows' yet."""
        if self._host_tokens is not None:
            self._host_tokens[rows, places] = token_ids
        else:
            where = to_device(np.stack((rows, places, token_ids)), self.tokens.device)
            self.tokens[where[0], where[1]] = where[2]

    def keep_verified(
        self,
        rows: Ints,  # [n], distinct
        counts: Ints,  # [n] draft tokens that were computed
        accepted: Ints,  # [n] those of them that are the rows' from now on, with the token behind them
    ) -> None:
        """The tokens are written already.  The keys and values of the other drafts are computed again, over these."""
        self.num_tokens[rows] += accepted + 1
        self.num_computed[rows] -= counts - accepted
        if self.states is not None:
            partly = rows[accepted < counts]
            self.states.put_back(partly, self.num_computed[partly])
