"""Rotary position embedding, the halves paired: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).

Only products and one sum, each rounded as IEEE says, so a token's result cannot depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(
    x: Tensor,  # [num_tokens, num_heads, head_dim]
    cos: Tensor,  # [num_tokens, 1, head_dim], the two halves alike
    sin: Tensor,  # [num_tokens, 1, head_dim], the first half negated
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return x * cos + swapped * sin
