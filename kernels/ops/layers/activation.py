"""The activations of the feed-forward layer, by name: gated ones multiply what they make of the gates with the rest.

    silu             gate / (1 + exp(-gate)) * up
    gelu_tanh        gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) * up
    sigmoid          1 / (1 + exp(-gate)) * up
    clamped_swiglu   g / (1 + exp(-1.702 g)) * (u + 1),  g = min(gate, 7), u = up held within -7 ... 7

The function of the gate is rounded to the tensor's dtype before it is multiplied.  A plain activation is that function
alone; clamped_swiglu has none.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import gelu, silu

CLAMP, STEEPNESS = 7.0, 1.702  # of clamped_swiglu
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "sigmoid": lambda x: x.sigmoid(),
}
GATED = ("silu", "gelu_tanh", "sigmoid", "clamped_swiglu")


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
    wide = gate.float().clamp(max=CLAMP)
    return (wide * (STEEPNESS * wide).sigmoid()).to(gate.dtype) * (up.clamp(-CLAMP, CLAMP) + 1)
