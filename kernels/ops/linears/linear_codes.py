"""y = x W^T + b with the weight as codes of 4 bits and the input in int8, both scaled by groups of input features.

y = sum over groups g, in order, of (sum_k q_x (code - zero)) * (scale_w * scale_x) + b

The sum within a group is exact; from group to group it goes by fused multiply-adds in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.linears.codes import MIDDLE, Codes, is_int8, quantise_to_codes
from kernels.ops.linears.linear import LinearWeight
from kernels.ops.linears.quantise import quantise


def pack_codes(codes: Codes) -> LinearWeight:
    """int8 by output feature becomes a weight of `linear_int8`.  Raises ValueError for codes that are no integers."""
    if codes.table is not None or codes.codes.dtype != torch.uint8:
        raise ValueError("only codes that are integers can be multiplied")
    if is_int8(codes):
        return LinearWeight((codes.codes ^ MIDDLE).view(torch.int8), scales=codes.scales.flatten())
    return LinearWeight(codes.codes, codes=codes)


def pack_linear(
    weight: Tensor,  # [out_features, in_features]
    group: int,
) -> LinearWeight:
    return pack_codes(quantise_to_codes(weight, group))


def linear(
    x: Tensor,  # [num_tokens, in_features]
    weight: LinearWeight,  # [out_features, in_features], with codes
    bias: Tensor | None = None,  # [out_features]
) -> Tensor:  # [num_tokens, out_features]
    codes = weight.codes
    assert codes is not None
    if codes.gather is not None:
        x = x[:, codes.gather]
    out = x.new_zeros((len(x), weight.out_features), dtype=torch.float32)
    for index, first in enumerate(range(0, x.shape[1], codes.group)):
        columns = slice(first, first + codes.group)
        quantised, scale = quantise(x[:, columns])
        values = codes.codes[:, columns].double()
        if codes.zeros is not None:
            values -= codes.zeros[:, index, None]
        # In float64 every sum of these integers is exact, so that no order of summation shows; and a product of two
        # float32, so that adding to it rounds as a fused multiply-add does (but for ties of both roundings).
        total = quantised.double() @ values.t()
        factor = codes.scales[:, index] * scale[:, None]
        out = torch.addcmul(out.double(), total, factor.double()).float()
    return (out if bias is None else out.add_(bias)).to(x.dtype)
