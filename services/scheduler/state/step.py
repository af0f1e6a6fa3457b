"""One step of a worker: what its plan asks for, until the answer has come."""

from __future__ import annotations

import msgspec

from services.scheduler.blocks.snapshots import Snapshot
from services.scheduler.draft_length.modes import PLAIN, SpeculationMode
from services.scheduler.draft_length.proposal import VerifiableDrafts
from services.scheduler.state.sequence import Sequence


class Step(msgspec.Struct, eq=False):
    """A plan that is being made, or that was sent and is not answered.  Its columns are parallel.

    A Struct, because one is made for each step: it fills its columns without a call of Python code.
    """

    step_id: int = -1  # given when the plan is committed
    sequences: list[Sequence] = []
    num_computed: list[int] = []  # before the step
    num_scheduled: list[int] = []
    num_samples: list[int] = []  # 1 where the last scheduled token is the last there is
    new_blocks: list[list[int]] = []
    drafts: list[VerifiableDrafts] = []  # counted in num_scheduled
    num_drafts: int = 0  # draft tokens of all
    num_admitted: int = 0
    loads: dict[Sequence, Snapshot] = {}  # with which states begin
    saves: dict[Sequence, Snapshot] = {}  # taken of states behind the step
    mode: SpeculationMode = PLAIN

    def drop(self, sequence: Sequence) -> int:
        """Take a sequence's part out; returns how many tokens it was."""
        if sequence not in self.sequences:
            return 0
        index = self.sequences.index(sequence)
        self.loads.pop(sequence, None)
        self.num_drafts -= len(self.drafts[index].token_ids)
        for column in (self.sequences, self.num_computed, self.num_samples, self.new_blocks, self.drafts):
            del column[index]
        return self.num_scheduled.pop(index)
