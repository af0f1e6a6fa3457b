"""y_h = x_h W_h^T: a linear of each head, such as those between a latent and the heads' keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops.linears import linear as plain
from kernels.ops.linears.linear import LinearWeight

Linear = Callable[[Tensor, LinearWeight, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of all heads, as a provider wants them: as one tensor, or one by one."""

    stacked: Tensor | None = None  # [num_heads, out_features, in_features]
    linears: tuple[LinearWeight, ...] = ()  # [num_heads] of [out_features, in_features]


def pack_heads(
    weights: Sequence[Tensor],  # [num_heads] of [out_features, in_features]
) -> HeadWeights:
    return HeadWeights(torch.stack(list(weights)))


def head_linear(
    x: Tensor,  # [num_tokens, num_heads, in_features]
    weights: HeadWeights,
) -> Tensor:  # [num_tokens, num_heads, out_features]
    assert weights.stacked is not None
    return torch.bmm(x.transpose(0, 1), weights.stacked.transpose(1, 2)).transpose(0, 1)


def pack_heads_alone(
    weights: Sequence[Tensor],  # [num_heads] of [out_features, in_features]
    *,
    pack: Callable[[Tensor], LinearWeight] = plain.pack_linear,
) -> HeadWeights:
    return HeadWeights(linears=tuple(map(pack, weights)))


def head_linear_alone(
    x: Tensor,  # [num_tokens, num_heads, in_features]
    weights: HeadWeights,
    *,
    linear: Linear = plain.linear,
) -> Tensor:  # [num_tokens, num_heads, out_features]
    """One head after the other, by a linear whose rows are alone."""
    each = (linear(x[:, head].contiguous(), weight, None) for head, weight in enumerate(weights.linears))
    return torch.stack(list(each), dim=1)
