"""What a decoder computes with, one entry per token, out of the columns of a step and the tables of the rows."""

from __future__ import annotations

import torch
from torch import Tensor


def step_inputs(
    tokens: Tensor,  # [num_rows, longest] int64 histories
    block_tables: Tensor,  # [num_rows, max_num_blocks] int32
    rows: Tensor,  # [num_seqs] int32
    computed: Tensor,  # [num_seqs] int32: the position of each one's first token
    starts: Tensor,  # [num_seqs + 1] int32: where each one's tokens begin in the step; the last: their number
    block_size: int,
    num_tokens: int,  # of the step, with padding: token 0 at position 0, with a slot below zero
) -> tuple[Tensor, Tensor, Tensor]:  # token ids, positions, slots: each [num_tokens] int64
    place = torch.arange(num_tokens, device=tokens.device)
    entry = torch.searchsorted(starts[1:].long(), place, right=True)
    real = entry < len(rows)
    entry = entry.clamp(max=len(rows) - 1)
    row = rows.long()[entry]
    position = torch.where(real, computed.long()[entry] + place - starts.long()[entry], 0)
    block = block_tables[row, position // block_size].long()
    slots = torch.where(real, block * block_size + position % block_size, -1)
    return torch.where(real, tokens[row, position], 0), position, slots
