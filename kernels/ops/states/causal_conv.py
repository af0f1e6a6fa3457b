"""A short causal convolution of each channel by itself, and its activation.

    y[t] = silu(weight[0] x[t - width + 1] + ... + weight[width - 1] x[t])

A sequence's state is what the convolution still needs of earlier tokens: its last width - 1 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.ops.states.state_plan import StatePlan


def causal_conv(
    x: Tensor,  # [num_tokens, num_channels]; tokens of padding may stand behind those of the plan
    weight: Tensor,  # [width, num_channels], width at least 2; the last row is the token's own
    states: Tensor,  # [num_slots, width - 1, num_channels], the oldest input first; written
    plan: StatePlan,
) -> Tensor:  # [num_tokens, num_channels], zeros of padding
    out, width = torch.zeros_like(x), len(weight)
    taps = weight.float()
    for slot, tokens, is_new in plan.sequences():
        held = torch.zeros_like(states[slot]) if is_new else states[slot]
        inputs = torch.cat((held, x[tokens].to(held.dtype)))  # [width - 1 + tokens, num_channels]
        count = len(inputs) - width + 1
        total = inputs[:count].float() * taps[0]
        for tap in range(1, width):
            total += inputs[tap : tap + count].float() * taps[tap]
        out[tokens] = silu(total.double()).to(x.dtype)  # where exponentials of any kind round alike
        states[slot] = inputs[count:]
    return out
