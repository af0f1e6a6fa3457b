"""Symmetric int8 along the last dimension: x is about q * scale, with scale = largest |x| / 127.

q = rint(x * (127 / largest)), ties to even, all in float32; a row of zeros has scale 0 and q 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127.0


def quantise(
    x: Tensor,  # [..., n]
) -> tuple[Tensor, Tensor]:  # int8 [..., n], and scales float32 [...]
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    levels = torch.full_like(largest, LEVELS)  # torch makes a number / tensor of a reciprocal, which rounds twice
    factor = torch.where(largest > 0, levels / largest, 0.0)
    return (wide * factor).round_().to(torch.int8), (largest / LEVELS).squeeze(-1)


def dequantise(
    quantised: Tensor,  # [..., n] int8
    scale: Tensor,  # [...] float32
) -> Tensor:  # [..., n] float32
    return quantised.float() * scale[..., None]
