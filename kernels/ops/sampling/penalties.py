"""Penalties for tokens that a history has, in this order, in place:

repetition: l / r where l > 0, else l * r, for every token of prompt and output, once however often it is there
frequency, presence: l - f * count - p * [count > 0], over the output
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalise(
    logits: Tensor,  # [n, vocab_size] float32, changed in place
    tokens: Tensor,  # [num_rows, longest] int64: histories
    rows: Tensor,  # [n] int64
    lengths: Tensor,  # [n] int64: of each history
    num_prompt: Tensor,  # [n] int64: how much of it is the prompt
    factors: tuple[Tensor, Tensor, Tensor],  # repetition, frequency, presence: each [n] float32; 1, 0, 0: off
) -> None:
    repetition, frequency, presence = (factor[:, None] for factor in factors)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    inside = places < lengths[:, None]
    history = torch.where(inside, tokens[rows], 0)
    output = inside & (places >= num_prompt[:, None])
    seen, counts = (
        torch.zeros_like(logits).scatter_add_(1, history, which.to(logits.dtype)) for which in (inside, output)
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen > 0, repeated, logits))
    logits.sub_(frequency * counts + presence * (counts > 0))
