"""y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension, computed in float32.

What is normed is rounded to the tensor's dtype before the weight is applied, as `kernels.ops.layers.rms_norm` does it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def layer_norm(
    x: Tensor,  # [..., hidden_size]
    weight: Tensor,  # [hidden_size]
    bias: Tensor | None,  # [hidden_size]
    eps: float,
) -> Tensor:  # [..., hidden_size]
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed * weight if bias is None else normed * weight + bias
