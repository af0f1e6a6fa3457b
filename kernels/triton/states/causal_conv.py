"""The short causal convolution: a program per sequence and stretch of channels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.states.state_plan import StatePlan
from kernels.triton.layers.activation import SILU, activate

BLOCK = 128  # channels of a program


def causal_conv(
    x: Tensor,  # [num_tokens, num_channels], channels behind each other
    weight: Tensor,  # [width, num_channels]
    states: Tensor,  # [num_slots, width - 1, num_channels], written
    plan: StatePlan,
) -> Tensor:  # [num_tokens, num_channels]
    width, num_channels = weight.shape
    out = x.new_zeros(x.shape)
    convolve[(len(plan.slots), triton.cdiv(num_channels, BLOCK))](
        x, weight, states, plan.slots, plan.starts, plan.computed, out, num_channels, x.stride(0),
        WIDTH=width, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def convolve(
    x: tl.tensor,  # [num_tokens, num_channels]
    weight: tl.tensor,  # [WIDTH, num_channels]
    states: tl.tensor,  # [num_slots, WIDTH - 1, num_channels]
    slots: tl.tensor,  # [num_seqs] int64
    starts: tl.tensor,  # [num_seqs + 1] int64
    computed: tl.tensor,  # [num_seqs] int64
    out: tl.tensor,  # [num_tokens, num_channels], contiguous
    num_channels: int,
    stride: int,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < num_channels
    first, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    held = states + tl.load(slots + sequence) * (WIDTH - 1) * num_channels + channels
    has_held = inside & ((tl.zeros_like(channels) + tl.load(computed + sequence)) > 0)
    for token in range(first, end):
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(WIDTH):
            place = token - (WIDTH - 1) + tap
            given = input_of(x, held, place, first, stride, num_channels, channels, inside, has_held, WIDTH)
            factor = tl.load(weight + tap * num_channels + channels, mask=inside, other=0.0)
            total += given.to(tl.float32) * factor.to(tl.float32)
        tl.store(out + token * num_channels + channels, activate(total, SILU).to(out.dtype.element_ty), mask=inside)
    for kept in tl.static_range(WIDTH - 1):  # in this order none is overwritten that is read later
        place = end - (WIDTH - 1) + kept
        last = input_of(x, held, place, first, stride, num_channels, channels, inside, has_held, WIDTH)
        tl.store(held + kept * num_channels, last.to(states.dtype.element_ty), mask=inside)


@triton.jit
def input_of(
    x: tl.tensor,  # [num_tokens, num_channels]
    held: tl.tensor,  # [BLOCK] pointers to the oldest input of the state
    token: int,  # before `first` one of the state's
    first: int,
    stride: int,
    num_channels: int,
    channels: tl.tensor,  # [BLOCK]
    inside: tl.tensor,  # [BLOCK]
    has_held: tl.tensor,  # [BLOCK]
    WIDTH: tl.constexpr,
) -> tl.tensor:  # [BLOCK]
    is_own = (tl.zeros_like(channels) + token) >= first
    own = tl.load(x + token * stride + channels, mask=inside & is_own, other=0.0)
    before = tl.load(held + (token - first + WIDTH - 1) * num_channels, mask=has_held & (is_own == 0), other=0.0)
    return tl.where(is_own, own, before)
