"""Linear layers of floating-point activations, by what the weight is and how many rows there are."""

from __future__ import annotations

from torch import Tensor

from kernels.ops.linears import linear as plain
from kernels.ops.linears.linear import LinearWeight
from kernels.triton.linears.linear_decoded import linear_decoded
from kernels.triton.linears.linear_row import linear_row


def linear(
    x: Tensor,  # [num_tokens, in_features]
    weight: LinearWeight,  # [out_features, in_features], plain or decoded
    bias: Tensor | None = None,  # [out_features]
    *,
    early: bool = False,  # as `launch.when` has it
) -> Tensor:  # [num_tokens, out_features]
    """Plain ones are the vendor's, whose library has more shapes of tile than one can tune by hand, but for one row."""
    if weight.decoded is not None:
        return linear_decoded(x, weight, bias)
    if len(x) == 1:
        return linear_row(x, weight, bias, early=early)
    return plain.linear(x, weight, bias)
