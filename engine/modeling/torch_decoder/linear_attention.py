"""Linear attention of the torch decoder: a convolution, the gated delta rule, and the norm and gate of its results.

States stay from step to step, one of each row of the plans; a sequence that begins takes its row's over as zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.description.spec import DeltaNetSpec
from engine.modeling.batch import Ints
from kernels.interface import Kernels
from kernels.ops.linears.linear import LinearWeight
from kernels.ops.states.delta_rule import delta_gates
from kernels.ops.states.state_plan import StatePlan
from kernels.ops.steps.transfer import to_device


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """One layer's, beside its projections."""

    described: DeltaNetSpec
    gates: LinearWeight  # [2 * value_heads, hidden_size], never quantised: of beta, then of the decay
    taps: Tensor  # [conv_width, channels]
    rate: Tensor  # [value_heads] float32
    step: Tensor  # [value_heads] float32
    norm: Tensor  # [value_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """One layer's, of all rows."""

    inputs: Tensor  # [num_rows, conv_width - 1, channels] in the format that computes
    states: Tensor  # [num_rows, value_heads, key_dim, value_dim] float32

    @classmethod
    def make(cls, d: DeltaNetSpec, num_rows: int, dtype: torch.dtype, device: torch.device) -> DeltaStates:
        return cls(
            torch.zeros(num_rows, d.conv_width - 1, d.channels, dtype=dtype, device=device),
            torch.zeros(num_rows, d.value_heads, d.key_dim, d.value_dim, device=device),
        )


def copy_rows(
    tensors: Iterable[Tensor],  # [num_rows, ...] each
    sources: Ints,  # [n]
    destinations: Ints,  # [n], distinct
) -> None:
    for tensor in tensors:
        where = to_device(np.stack((sources, destinations)), tensor.device)
        tensor[where[1]] = tensor[where[0]]


def attend_linearly(
    weights: DeltaWeights,
    hidden: Tensor,  # [num_tokens, hidden_size]
    projected: Tensor,  # [num_tokens, channels + value_features]: queries, keys, values, gates of the results
    kernels: Kernels,
    held: DeltaStates,
    plan: StatePlan,
) -> Tensor:  # [num_tokens, value_features]
    d = weights.described
    mixed = kernels.causal_conv(projected[:, : d.channels], weights.taps, held.inputs, plan)
    decay, beta = delta_gates(kernels.exact_linear(hidden, weights.gates, None), weights.rate, weights.step)
    query, key, value = mixed.tensor_split((d.key_features, 2 * d.key_features), dim=1)
    result = kernels.gated_delta_rule(
        query.view(-1, d.key_heads, d.key_dim),
        key.view(-1, d.key_heads, d.key_dim),
        value.view(-1, d.value_heads, d.value_dim),
        decay,
        beta,
        held.states,
        plan,
    )
    normed = kernels.rms_norm(result, weights.norm, weights.eps).flatten(1)
    return kernels.gated_activation(torch.cat((projected[:, d.channels :], normed), dim=1), "silu")
