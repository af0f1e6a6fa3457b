"""What a proof says of each comparison, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS = ("pair", "variant", "sampling", "prompts", "tokens", "differing", "drafted", "accepted", "preempted", "ids")
ALIGNS = "<<<>>>>>><"


@dataclass(frozen=True)
class ModeVerdict:
    """One kind of sampling in one variant, held against the same without drafts."""

    pair: str
    variant: str
    kind: str
    num_prompts: int
    num_tokens: int
    num_differing: int  # prompts
    num_draft_tokens: int
    num_accepted_tokens: int
    num_preemptions: int
    missing: str = ""  # what was to happen and did not

    @property
    def failed(self) -> bool:
        return bool(self.num_differing or self.missing)

    @property
    def acceptance(self) -> str:
        return f"{self.num_accepted_tokens / self.num_draft_tokens:.3f}" if self.num_draft_tokens else "-"

    @property
    def cells(self) -> tuple[str, ...]:
        counts = (self.num_prompts, self.num_tokens, self.num_differing, self.num_draft_tokens)
        verdict = f"FAILED {self.missing}".rstrip() if self.failed else "same"
        names = (self.pair, self.variant, self.kind)
        return (*names, *map(str, counts), self.acceptance, str(self.num_preemptions), verdict)


def table(verdicts: Sequence[ModeVerdict]) -> str:
    """Aligned, counts to the right."""
    rows = [COLUMNS, *(verdict.cells for verdict in verdicts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = (
        "  ".join(f"{cell:{align}{width}}" for cell, align, width in zip(row, ALIGNS, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
