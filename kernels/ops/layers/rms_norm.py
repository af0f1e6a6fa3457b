"""y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension, computed in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def rms_norm(
    x: Tensor,  # [..., hidden_size]
    weight: Tensor,  # [hidden_size]
    eps: float,
) -> Tensor:  # [..., hidden_size]
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(
    x: Tensor,  # [..., hidden_size]
    residual: Tensor,  # [..., hidden_size]
    weight: Tensor,  # [hidden_size]
    eps: float,
    *,
    normalise: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
) -> tuple[Tensor, Tensor]:  # the norm of the sum, and the sum: the next residual
    total = x + residual
    return normalise(total, weight, eps), total
