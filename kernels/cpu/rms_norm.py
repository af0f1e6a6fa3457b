"""RMSNorm with its sum in float64, where the order of summation leaves no trace in float32."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.ops.layers import rms_norm as reference


def rms_norm(
    x: Tensor,  # [..., hidden_size]
    weight: Tensor,  # [hidden_size]
    eps: float,
) -> Tensor:  # [..., hidden_size]
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).sqrt_().reciprocal_().float()
    return (x * scale).to(x.dtype) * weight


add_rms_norm = partial(reference.add_rms_norm, normalise=rms_norm)
