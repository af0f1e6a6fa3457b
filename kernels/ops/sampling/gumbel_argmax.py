"""Samples one token per row: the best of value + Gumbel noise among those that truncation leaves.

A row keeps the tokens above `cut`, and of those equal to it the ones with ids up to `last_tied`.  Scores are float64;
among equal scores the lowest id wins; a row with nothing left gives token 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.sampling.noise import gumbel_noise

BLOCK = 1 << 22  # scores held at a time


def gumbel_argmax(
    values: Tensor,  # [num_rows, vocab_size] float32: processed logits / temperature
    cut: Tensor,  # [num_rows] float32
    last_tied: Tensor,  # [num_rows] int64
    keys: tuple[Tensor, Tensor],  # each [num_rows] int64, from `kernels.ops.sampling.noise.row_keys`
) -> Tensor:  # [num_rows] int64
    token_ids = torch.arange(values.shape[1], device=values.device)
    size = max(1, BLOCK // values.shape[1])
    chosen = []
    for start in range(0, len(values), size):
        rows = slice(start, start + size)
        first, second = (key[rows, None] for key in keys)
        scores = values[rows].double() + gumbel_noise(first, second, token_ids)
        tied = (values[rows] == cut[rows, None]) & (token_ids > last_tied[rows, None])
        chosen.append(scores.masked_fill_((values[rows] < cut[rows, None]) | tied, float("-inf")).argmax(1))
    return torch.cat(chosen)
