"""One step as a model sees it: which tokens of which rows, and whose hidden states are wanted back."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class StepBatch(msgspec.Struct, frozen=True):
    """`rows` index the tables; a sequence's tokens are those at positions computed ... computed + scheduled - 1.

    Entries are sequences, in the order of the step.  `wanted` is 0 where the result is not read (a chunk of a
    prompt), 1 where the last token samples, k + 1 where k drafted tokens are verified.
    """

    rows: Ints  # [num_seqs], distinct
    computed: Ints  # [num_seqs] tokens before this step
    scheduled: Ints  # [num_seqs] tokens of this step, at least one each
    wanted: Ints  # [num_seqs] last tokens of the step whose hidden states are returned
    tokens: Tensor  # [num_rows, longest] int64 token ids, on the model's device
    block_tables: Ints  # [num_rows, num_pools * max_num_blocks] block ids: the tables of all pools beside each other
    block_size: int  # tokens
    adapters: Ints | None = None  # [num_seqs] places of held ones, or -1; None: no sequence has one

    @property
    def num_wanted(self) -> int:
        return int(np.add.reduce(self.wanted))

    def wanted_places(self) -> Ints:
        """Of the tokens whose hidden states are returned [sum of wanted], among all of the step."""
        firsts = np.cumsum(self.scheduled) - np.cumsum(self.wanted)
        return np.repeat(firsts, self.wanted) + np.arange(self.num_wanted)
