"""Symmetric int8 along the last dimension: x is about q * scale, with scale = largest |x| / 127.

q = rint(x * (127 / largest)), ties to even, all in float32; a row of zeros has scale 0 and q 0.

fp8 is E4M3 (no infinities, 448 the largest) or E5M2 (57344): x / scale, held within the range and rounded to nearest,
ties to even.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127.0
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantise(
    x: Tensor,  # [..., n]
) -> tuple[Tensor, Tensor]:  # int8 [..., n], and scales float32 [...]
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    levels = torch.full_like(largest, LEVELS)  # torch makes reciprocals where a side is a number, which rounds twice
    factor = torch.where(largest > 0, levels / largest, 0.0)
    return (wide * factor).round_().to(torch.int8), (largest / levels).squeeze(-1)


def dequantise(
    quantised: Tensor,  # [..., n] int8 or fp8
    scale: Tensor,  # [...] float32, or what broadcasts to it
) -> Tensor:  # [..., n] float32
    return quantised.float() * scale[..., None]


def saturate_fp8(
    x: Tensor,  # [..., heads, n]
    scales: Tensor,  # [heads] float32
    dtype: torch.dtype,  # of LARGEST
) -> Tensor:  # `dtype` [..., heads, n]
    return (x.float() / scales[:, None]).clamp_(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
