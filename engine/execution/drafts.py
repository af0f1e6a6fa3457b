"""Reads the draft tokens of a plan, and refuses what cannot be; a worker's own drafter."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from engine.modeling.batch import Ints, StepBatch
from engine.sampling.drafts import Drafts, lay_out
from engine.sampling.proposals import certain_proposals, unpack_distributions
from shared.errors import FatalError
from shared.messages.steps import StepPlan


class Drafter(Protocol):
    """A head that drafts what may follow the rows."""

    captures: tuple[int, ...]  # layers of the model whose inputs it reads; empty: the final hidden states

    def follow(
        self,
        batch: StepBatch,
        captured: Tensor,  # [num_tokens, number of captures * hidden_size]
        wanted: Ints,  # [num_seqs] drafts
        *,
        is_certain: bool = False,  # they have to be the likeliest
    ) -> tuple[list[int], list[int]]:
        """Once the rows have the step's tokens: drafts of each sequence, and all of them one after the other."""
        ...


def read_counts(plan: StepPlan) -> Ints | None:
    """Draft tokens of each entry [num_entries]; None where the step has none.  Raises FatalError."""
    if not plan.num_draft_tokens and not plan.draft_token_ids:
        return None
    counts = np.array(plan.num_draft_tokens, np.int64)
    if len(counts) not in (0, len(plan.rows)) or (len(counts) and int(counts.min()) < 0):
        raise FatalError(f"plan has draft counts {plan.num_draft_tokens} for {len(plan.rows)} rows")
    total = int(np.add.reduce(counts))
    if total != len(plan.draft_token_ids):
        raise FatalError(f"plan has {len(plan.draft_token_ids)} draft tokens for counts that sum to {total}")
    return counts if total else None


def read_drafts(plan: StepPlan, counts: Ints, vocab_size: int) -> Drafts:
    """`counts`: of the sequences that sample, which have all draft tokens.  Raises FatalError."""
    token_ids = np.array(plan.draft_token_ids, np.int64)
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise FatalError(f"plan has a draft token outside the vocabulary of {vocab_size}")
    if not plan.rejection:
        return lay_out(counts, token_ids, None)
    if not plan.draft_distributions:
        return lay_out(counts, token_ids, certain_proposals(token_ids))
    return lay_out(counts, token_ids, unpack_distributions(plan.draft_distributions, token_ids, vocab_size))
