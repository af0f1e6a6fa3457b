"""Verification by equality: a sequence keeps its draft tokens up to the first that is not what the target took there,
and with them the token that the target took next.
"""

from __future__ import annotations

import torch
from torch import Tensor


def verify_drafts(
    chosen: Tensor,  # [num_positions] int64: what the target takes, each behind the drafts before it
    draft_ids: Tensor,  # [num_positions] int32: the draft to be verified there; below zero: none, or a refused one
    starts: Tensor,  # [num_seqs] int32: the first position of each sequence, growing
    tokens: Tensor,  # [num_rows, longest] int64 histories, written
    rows: Tensor,  # [num_seqs] int32
    lengths: Tensor,  # [num_seqs] int32 tokens of each history
) -> Tensor:  # [num_seqs] int32: the drafts that each keeps; its history has them and the token behind them
    ends = (chosen != draft_ids).nonzero()[:, 0]
    accepted = ends[torch.searchsorted(ends, starts.long())] - starts
    counts = accepted + 1
    firsts = counts.cumsum(0) - counts
    which = torch.arange(len(counts)).repeat_interleave(counts)
    within = torch.arange(len(which)) - firsts[which]
    tokens[rows[which].long(), lengths[which] + within] = chosen[starts[which] + within]
    return accepted.to(torch.int32)
