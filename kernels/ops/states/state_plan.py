"""Which tokens of a step pass through which state: layers of linear attention keep one of fixed size per sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Of one step.  A sequence's tokens lie behind one another, in order of their positions."""

    slots: Tensor  # [num_seqs] int64, distinct: places of the sequences' states
    starts: Tensor  # [num_seqs + 1] int64: first token of each sequence among the step's, and the number of tokens
    computed: Tensor  # [num_seqs] int64: tokens before the step; 0: the state begins as zeros, whatever is there

    def sequences(self) -> Iterator[tuple[int, slice, bool]]:
        """Of each sequence its slot, its tokens, and whether its state begins as zeros.  Waits for the device."""
        starts = self.starts.tolist()
        for index, (slot, computed) in enumerate(zip(self.slots.tolist(), self.computed.tolist(), strict=True)):
            yield slot, slice(starts[index], starts[index + 1]), computed == 0
