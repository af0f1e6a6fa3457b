"""Verification by equality: a sequence keeps its draft tokens up to the first that is not what the target took there,
and with them the token that the target took next.
"""

from __future__ import annotations

import numpy as np
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
    taken, first = chosen.numpy(), starts.numpy().astype(np.int64)  # numpy: a step of few rows costs what calls cost
    ends = np.flatnonzero(taken != draft_ids.numpy())
    accepted = ends[np.searchsorted(ends, first)] - first
    counts = accepted + 1
    within = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
    places = lengths.numpy().repeat(counts) + within
    tokens.numpy()[rows.numpy().repeat(counts), places] = taken[first.repeat(counts) + within]
    return torch.from_numpy(accepted.astype(np.int32))
