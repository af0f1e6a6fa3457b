"""y = x W^T + b, with the weight packed once at load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops.linears.codes import Codes
from kernels.ops.linears.decoded_weight import DecodedWeight


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight as a provider wants it; what is beyond `weight` belongs to the provider that packed it."""

    weight: Tensor  # [out_features, in_features]
    chunks: tuple[Tensor, ...] = ()  # transposed views [<= chunk, out_features], in order of input features
    tile: int = 0  # rows multiplied at a time
    scales: Tensor | None = None  # float32: [out_features] of a weight in int8, [groups, out_features] of one in E4M3
    group: int = 0  # input features that share a scale of E4M3; 0: all
    codes: Codes | None = None  # of a weight in 4 bits
    decoded: DecodedWeight | None = None  # while it is multiplied; then `weight` has no features

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


def pack_linear(
    weight: Tensor,  # [out_features, in_features]
) -> LinearWeight:
    return LinearWeight(weight)


def linear(
    x: Tensor,  # [num_tokens, in_features]
    weight: LinearWeight,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
) -> Tensor:  # [num_tokens, out_features]
    return torch.nn.functional.linear(x, weight.weight, bias)


def linear_rounded(
    x: Tensor,  # [num_tokens, in_features] float32
    weight: LinearWeight,  # [out_features, in_features] float32, whose values bfloat16 can hold
    bias: Tensor | None = None,  # [out_features]
    *,
    multiply: Callable[[Tensor, LinearWeight, Tensor | None], Tensor] = linear,
) -> Tensor:  # [num_tokens, out_features]: products of bfloat16, summed in float32
    return multiply(x.bfloat16().float(), weight, bias)
