"""y = x W^T + b with both sides in E4M3: the weight as it is stored or quantised once, the input as it comes.

y = sum over groups g, in order, of (sum_k q_x q_w) * (scale_w * scale_x) + b       summed in float32

A weight has a scale for each output feature, or for each of its groups of input features; the input has one for each
row, or for each of the same groups of a row: scale_x = largest |x| / 448, q_x = x * (448 / largest |x|) in E4M3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.linears.codes import Codes
from kernels.ops.linears.linear import LinearWeight
from kernels.ops.linears.quantise import LARGEST

FP8 = torch.float8_e4m3fn
GROUP_MULTIPLE = 128  # input features


def pack_linear(
    weight: Tensor,  # [out_features, in_features]
) -> LinearWeight:
    """With a scale for each output feature."""
    quantised, scales = quantise_groups(weight, weight.shape[1])
    return LinearWeight(quantised, scales=scales)


def pack_codes(
    codes: Codes,  # [out_features, in_features]
) -> LinearWeight:
    """As they are.  Raises ValueError for what is not E4M3, or has smaller groups."""
    group = min(codes.group, codes.shape[1])
    if codes.codes.dtype != FP8 or codes.gather is not None:
        raise ValueError("codes must be E4M3")
    if group < codes.shape[1] and group % GROUP_MULTIPLE:
        raise ValueError(f"groups must be multiples of {GROUP_MULTIPLE} input features")
    return LinearWeight(codes.codes, scales=codes.scales.t().contiguous(), group=group if group < codes.shape[1] else 0)


def linear(
    x: Tensor,  # [num_tokens, in_features]
    weight: LinearWeight,  # [out_features, in_features] E4M3, with scales
    bias: Tensor | None = None,  # [out_features]
) -> Tensor:  # [num_tokens, out_features]
    assert weight.scales is not None
    depth = x.shape[1]
    group = weight.group or depth
    quantised, scales = quantise_groups(x, group)
    out = torch.zeros(len(x), weight.out_features, dtype=torch.float32, device=x.device)
    for index, start in enumerate(range(0, depth, group)):
        left, right = (side[:, start : start + group].float() for side in (quantised, weight.weight))
        out += left @ right.t() * (weight.scales[index] * scales[index][:, None])
    return (out if bias is None else out + bias).to(x.dtype)


def quantise_groups(
    x: Tensor,  # [n, k]
    group: int,
) -> tuple[Tensor, Tensor]:  # E4M3 [n, k], and scales float32 [num_groups, n]
    rows, depth = x.shape
    groups = -(-depth // group)
    wide = torch.nn.functional.pad(x.float(), (0, groups * group - depth)).view(rows, groups, group)
    largest = wide.abs().amax(2)
    most = torch.full_like(largest, LARGEST[FP8])  # torch makes reciprocals where a side is a number
    factor = torch.where(largest > 0, most / largest, 0.0)
    quantised = (wide * factor[:, :, None]).clamp_(-LARGEST[FP8], LARGEST[FP8]).to(FP8)
    return quantised.view(rows, -1)[:, :depth].contiguous(), (largest / most).t().contiguous()
