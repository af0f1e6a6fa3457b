"""A linear layer's weight and bias, as the torch decoder holds them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.interface import Kernels
from kernels.ops.linears.linear import LinearWeight


@dataclass(frozen=True, slots=True)
class Projection:
    weight: LinearWeight  # [out_features, in_features]
    bias: Tensor | None  # [out_features]

    def __call__(
        self,
        kernels: Kernels,
        x: Tensor,  # [num_tokens, in_features]
    ) -> Tensor:  # [num_tokens, out_features]
        return kernels.linear(x, self.weight, self.bias)
