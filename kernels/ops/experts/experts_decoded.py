"""A mixture of experts with the weights as codes that become numbers of the input's format while they are multiplied.

It is `kernels.ops.experts.experts` with the products of `kernels.ops.linears.linear_decoded`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from kernels.ops.experts import experts
from kernels.ops.experts.experts import ExpertWeights
from kernels.ops.linears import linear_decoded
from kernels.ops.linears.codes import Codes
from kernels.ops.linears.decoded_weight import LONG, SLABS, pack_decoded, stack_decoded
from kernels.ops.linears.linear import LinearWeight

SHORT = tuple(size for size in SLABS if size < LONG)  # slabs that leave room for tiles of many rows


def pack_experts_decoded(
    codes: Iterable[Codes],  # [count] of [out_features, in_features]; packed one by one as they come
    bias: Tensor | None,  # [count, out_features]
) -> ExpertWeights:
    """For matrix units that decode.  Raises ValueError for codes that they do not decode, or not as one weight."""
    return ExpertWeights(bias=bias, decoded=stack_decoded([pack_decoded(one, SHORT) for one in codes]))


def experts_decoded(
    x: Tensor,  # [num_tokens, hidden_size]
    ids: Tensor,  # [num_tokens, top_k] int64
    weights: Tensor,  # [num_tokens, top_k] float32
    gate_up: tuple[Sequence[Codes], Tensor | None],  # of [2 * inner_size or inner_size, hidden_size], and biases
    down: tuple[Sequence[Codes], Tensor | None],  # of [hidden_size, inner_size], and biases
    kind: str,  # of activation
    gated: bool,
) -> Tensor:  # [num_tokens, hidden_size]
    first, second = (
        ExpertWeights(tuple(LinearWeight(one.codes, codes=one) for one in codes), bias)
        for codes, bias in (gate_up, down)
    )
    return experts.experts(x, ids, weights, first, second, kind, gated, linear=_linear)


def _linear(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    assert weight.codes is not None
    return linear_decoded.linear_decoded(x, weight.codes, bias)
