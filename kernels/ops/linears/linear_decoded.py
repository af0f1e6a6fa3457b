"""y = x W^T + b with the weight as codes that become numbers of the input's format while they are multiplied.

y = sum_k x_k round((value(code) - zero) * scale) + b, summed in float32, in parts of the input features
"""

from __future__ import annotations

from torch import Tensor

from kernels.ops.linears import decoded_weight
from kernels.ops.linears.codes import Codes
from kernels.ops.linears.linear import LinearWeight


def pack_decoded(codes: Codes) -> LinearWeight:
    """For matrix units that decode.  Raises ValueError for codes that they do not decode."""
    return LinearWeight(codes.codes.new_empty(codes.shape[0], 0), decoded=decoded_weight.pack_decoded(codes))


def linear_decoded(
    x: Tensor,  # [num_tokens, in_features]
    codes: Codes,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
) -> Tensor:  # [num_tokens, out_features]
    values = codes.dequantised().to(x.dtype)
    out = x.float() @ values.float().t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
