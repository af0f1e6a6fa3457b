"""The activations of `kernels.ops.layers.activation` with the exponential in float64.

A vectorised float32 exponential and the scalar one at the end of a loop differ by a bit, and which elements are at an
end depends on the number of rows and threads.  In float64 the difference does not survive the rounding back.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from kernels.ops.layers.activation import CLAMP, STEEPNESS


def activation(
    x: Tensor,  # [..., intermediate_size]
    kind: str,  # of PLAIN; KeyError for another
) -> Tensor:  # [..., intermediate_size]
    return PLAIN[kind](x)


def gated_activation(
    gate_up: Tensor,  # [num_tokens, 2 * intermediate_size], the gates first
    kind: str,  # of GATED; KeyError for another
) -> Tensor:  # [num_tokens, intermediate_size]
    gate, up = gate_up.chunk(2, dim=-1)
    if kind != "clamped_swiglu":
        return PLAIN[kind](gate) * up
    wide = gate.double().clamp_(max=CLAMP)
    glu = wide.div_((-STEEPNESS * wide).exp_().add_(1)).to(gate.dtype)
    return glu * (up.clamp(-CLAMP, CLAMP) + 1)


def _silu(
    x: Tensor,  # [..., intermediate_size]
) -> Tensor:  # [..., intermediate_size]
    wide = x.double()
    return wide.div_(wide.neg().exp_().add_(1)).to(x.dtype)


def _gelu_tanh(
    x: Tensor,  # [..., intermediate_size]
) -> Tensor:  # [..., intermediate_size]
    """(1 + tanh(u)) / 2 as 1 / (1 + exp(-2 u)): no digits are lost where the tanh is near -1."""
    wide = x.double()
    exponent = wide.square().mul_(0.044715).add_(1).mul_(wide).mul_(-2 * math.sqrt(2 / math.pi))
    return wide.div_(exponent.exp_().add_(1)).to(x.dtype)


def _sigmoid(
    x: Tensor,  # [..., intermediate_size]
) -> Tensor:  # [..., intermediate_size]
    return x.double().sigmoid_().to(x.dtype)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {"silu": _silu, "gelu_tanh": _gelu_tanh, "sigmoid": _sigmoid}
