"""The gated activation of the feed-forward layer: silu(gate) * up, silu(g) = g / (1 + exp(-g))."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(
    gate_up: Tensor,  # [num_tokens, 2 * intermediate_size], the gates first
) -> Tensor:  # [num_tokens, intermediate_size]
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
