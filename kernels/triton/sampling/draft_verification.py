"""Verification by equality where the tokens are: one program per sequence, and nothing comes back but counts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_DRAFTS = 64  # that a sequence can have


def verify_drafts(
    chosen: Tensor,  # [num_positions] int64: what the target takes, each behind the drafts before it
    draft_ids: Tensor,  # [num_positions] int32: the draft to be verified there; below zero: none, or a refused one
    starts: Tensor,  # [num_seqs] int32: the first position of each sequence, growing
    tokens: Tensor,  # [num_rows, longest] int64 histories, written
    rows: Tensor,  # [num_seqs] int32
    lengths: Tensor,  # [num_seqs] int32 tokens of each history
) -> Tensor:  # [num_seqs] int32: the drafts that each keeps; its history has them and the token behind them
    accepted = torch.empty(len(rows), dtype=torch.int32, device=chosen.device)
    verify_sequences[(len(rows),)](
        chosen, draft_ids, starts, tokens, rows, lengths, accepted, len(chosen), tokens.stride(0),
        BLOCK=2 * MAX_DRAFTS, num_warps=1,
    )  # fmt: skip
    return accepted


@triton.jit
def verify_sequences(
    chosen: tl.tensor,  # [num_positions] int64
    draft_ids: tl.tensor,  # [num_positions] int32
    starts: tl.tensor,  # [num_seqs] int32
    tokens: tl.tensor,  # [num_rows, longest] int64
    rows: tl.tensor,  # [num_seqs] int32
    lengths: tl.tensor,  # [num_seqs] int32
    accepted: tl.tensor,  # [num_seqs] int32
    num_positions: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    one = tl.program_id(0)
    start = tl.load(starts + one)
    offsets = tl.arange(0, BLOCK)
    inside = start + offsets < num_positions
    taken = tl.load(chosen + start + offsets, mask=inside, other=0)
    drafts = tl.load(draft_ids + start + offsets, mask=inside, other=-1)
    count = tl.min(tl.where(taken != drafts, offsets, BLOCK), 0)
    history = tokens + tl.load(rows + one).to(tl.int64) * stride + tl.load(lengths + one)
    tl.store(history + offsets, taken, mask=inside & (offsets <= count))
    tl.store(accepted + one, count)
