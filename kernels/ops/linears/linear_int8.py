"""y = x W^T + b with both sides in int8: the weight per output feature, once; the input per row, as it comes.

y = (float(sum_k q_x q_w) * scale_w) * scale_x + b      the sum exact, the rest float32
"""

from __future__ import annotations

from torch import Tensor

from kernels.ops.linears.linear import LinearWeight
from kernels.ops.linears.quantise import dequantise, quantise


def pack_linear(
    weight: Tensor,  # [out_features, in_features]
) -> LinearWeight:
    quantised, scales = quantise(weight)
    return LinearWeight(quantised, scales=scales)


def linear(
    x: Tensor,  # [num_tokens, in_features]
    weight: LinearWeight,  # [out_features, in_features] int8, with scales
    bias: Tensor | None = None,  # [out_features]
) -> Tensor:  # [num_tokens, out_features]
    assert weight.scales is not None
    quantised, scale = quantise(x)
    # In float64 every sum of these integers is exact, so that no order of summation shows.
    total = (quantised.double() @ weight.weight.double().t()).float()
    out = total.mul_(weight.scales).mul_(scale[:, None])
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def read_rows(
    weight: LinearWeight,  # [vocab_size, hidden_size] int8, with scales
    rows: Tensor,  # [n] int64
) -> Tensor:  # [n, hidden_size] float32: an embedding read out of the head
    assert weight.scales is not None
    return dequantise(weight.weight.index_select(0, rows), weight.scales.index_select(0, rows))
