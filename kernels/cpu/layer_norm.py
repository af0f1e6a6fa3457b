"""LayerNorm with its sums in float64, where the order of summation leaves no trace in float32."""

from __future__ import annotations

from torch import Tensor


def layer_norm(
    x: Tensor,  # [..., hidden_size]
    weight: Tensor,  # [hidden_size]
    bias: Tensor | None,  # [hidden_size]
    eps: float,
) -> Tensor:  # [..., hidden_size]
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = centred.square().mean(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    normed = centred.mul_(scale).to(x.dtype)
    return normed * weight if bias is None else normed * weight + bias
