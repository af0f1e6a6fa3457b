"""The gated delta rule (arXiv 2412.06464): attention without a cache, whose state is one matrix of each head.

For each token, with a state S [key_dim, value_dim] of float32, and keys and queries of length one:

    S = decay * S
    S = S + key (beta * (value - key^T S))^T         the state's answer to this key moves towards the value
    out = S^T query / sqrt(key_dim)

One token after the other: the state then has the same bits however a prompt is cut into steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.states.state_plan import StatePlan

EPS = 1e-6  # of the lengths of queries and keys


def gated_delta_rule(
    query: Tensor,  # [num_tokens, num_key_heads, key_dim]; tokens of padding may stand behind those of the plan
    key: Tensor,  # [num_tokens, num_key_heads, key_dim]
    value: Tensor,  # [num_tokens, num_value_heads, value_dim]; neighbouring heads share a key head
    decay: Tensor,  # [num_tokens, num_value_heads] float32, 0 ... 1
    beta: Tensor,  # [num_tokens, num_value_heads] float32, 0 ... 1
    states: Tensor,  # [num_slots, num_value_heads, key_dim, value_dim] float32, written
    plan: StatePlan,
) -> Tensor:  # [num_tokens, num_value_heads, value_dim], zeros of padding
    out = torch.zeros_like(value)
    share = value.shape[1] // key.shape[1]
    queries = (_normalised(query) * query.shape[-1] ** -0.5).repeat_interleave(share, 1)[..., None]
    keys, values = _normalised(key).repeat_interleave(share, 1)[..., None], value.float()
    for slot, tokens, is_new in plan.sequences():
        state = states[slot]
        if is_new:
            state.zero_()
        for token in range(tokens.start, tokens.stop):
            state *= decay[token, :, None, None]
            answer = (state * keys[token]).sum(1)  # [num_value_heads, value_dim]
            state += keys[token] * ((values[token] - answer) * beta[token, :, None])[:, None]
            out[token] = (state * queries[token]).sum(1).to(out.dtype)
    return out


def _normalised(
    x: Tensor,  # [..., dim]
) -> Tensor:  # [..., dim] float32, of length one: summed in float64, where the order of the sum leaves no trace
    wide = x.double()
    return (wide / (wide.square().sum(-1, keepdim=True) + EPS).sqrt()).float()


def delta_gates(
    mixed: Tensor,  # [num_tokens, 2 * num_value_heads]: what becomes beta, then what becomes the decay
    rate: Tensor,  # [num_value_heads] float32, above zero
    bias: Tensor,  # [num_value_heads] float32
) -> tuple[Tensor, Tensor]:  # decay and beta, each [num_tokens, num_value_heads] float32
    """In float64, where a vectorised exponential and a scalar one differ by less than is left after the rounding."""
    strength, step = mixed.double().chunk(2, dim=1)
    decay = torch.exp(-rate.double() * torch.nn.functional.softplus(step + bias.double()))
    return decay.float(), torch.sigmoid(strength).float()
