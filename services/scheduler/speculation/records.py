"""Counts of the verified and accepted draft tokens of each sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.draft_length.acceptance import AcceptanceRate
from services.scheduler.draft_length.proposal import DraftProposal
from services.scheduler.state.sequence import Sequence


@dataclass(slots=True)
class DraftRecord:
    """Of one sequence."""

    num_draft_tokens: int = 0  # verified
    num_accepted_tokens: int = 0  # of those
    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    proposal: DraftProposal | None = None  # of its worker's draft head


NO_RECORD = DraftRecord()  # of a sequence whose drafts were never verified; never written to


class DraftRecords:
    """A side table of the sequences that had draft tokens."""

    def __init__(self) -> None:
        self.by_sequence: dict[Sequence, DraftRecord] = {}  # read for each output, so without a method between

    def of(self, sequence: Sequence) -> DraftRecord:
        """To be read only."""
        return self.by_sequence.get(sequence, NO_RECORD)

    def propose(self, sequence: Sequence, proposal: DraftProposal) -> None:
        """Keep what a worker's draft head proposes, in the place of what it proposed before."""
        self._made(sequence).proposal = proposal

    def _made(self, sequence: Sequence) -> DraftRecord:
        record = self.by_sequence.get(sequence)
        if record is None:
            record = self.by_sequence[sequence] = DraftRecord()
        return record

    def add(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> DraftRecord:
        """Count a verification; returns the record, whose acceptance the caller updates."""
        record = self._made(sequence)
        record.num_draft_tokens += num_draft_tokens
        record.num_accepted_tokens += num_accepted
        return record

    def copy(self, sequence: Sequence, to: Sequence) -> None:
        """Another sequence has the counts of this one; how likely its drafts are accepted is not known."""
        if record := self.by_sequence.get(sequence):
            self.by_sequence[to] = DraftRecord(record.num_draft_tokens, record.num_accepted_tokens)

    def forget(self, sequence: Sequence) -> None:
        self.by_sequence.pop(sequence, None)
