"""The activations of the feed-forward layer, gated and plain: a stretch of a row per program."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.layers.activation import CLAMP, STEEPNESS
from kernels.triton.launch import num_warps, power_of_2, wait_for_others, when

LONGEST = 2048  # elements of a program
SILU, GELU_TANH, CLAMPED_SWIGLU, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
PLAIN = {"silu": SILU.value, "gelu_tanh": GELU_TANH.value, "sigmoid": SIGMOID.value}
GATED = PLAIN | {"clamped_swiglu": CLAMPED_SWIGLU.value}
MOST, STEEP = tl.constexpr(CLAMP), tl.constexpr(STEEPNESS)
TWICE_ROOT, CUBIC = tl.constexpr(2 * math.sqrt(2 / math.pi)), tl.constexpr(0.044715)


def activation(
    x: Tensor,  # [..., intermediate_size]
    kind: str,  # of PLAIN; KeyError for another
    *,
    early: bool = False,  # as `launch.when` has it
) -> Tensor:  # [..., intermediate_size]
    rows = x.reshape(-1, x.shape[-1])
    return _launch(rows, rows.shape[1], PLAIN[kind], gated=False, early=early).view(x.shape)


def gated_activation(
    gate_up: Tensor,  # [num_tokens, 2 * intermediate_size], the gates first
    kind: str,  # of GATED; KeyError for another
    *,
    early: bool = False,
) -> Tensor:  # [num_tokens, intermediate_size]
    return _launch(gate_up, gate_up.shape[1] // 2, GATED[kind], gated=True, early=early)


def _launch(
    x: Tensor,  # [num_tokens, size], or [num_tokens, 2 * size] where gated
    size: int,
    kind: int,
    *,
    gated: bool,
    early: bool,
) -> Tensor:  # [num_tokens, size]
    num_tokens = x.shape[0]
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    block = min(LONGEST, power_of_2(size))
    activate_rows[(num_tokens, triton.cdiv(size, block))](
        x,
        out,
        size,
        x.stride(0),
        KIND=kind,
        IS_GATED=gated,
        BLOCK=block,
        num_warps=num_warps(block),
        **when(early, x),
    )
    return out


@triton.jit
def activate_rows(
    x: tl.tensor,  # [num_tokens, size], or [num_tokens, 2 * size] where IS_GATED
    out: tl.tensor,  # [num_tokens, size], contiguous
    size: int,
    stride: int,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = activate(gate, KIND)
    if IS_GATED:
        up = tl.load(x + row * stride + size + columns, mask=inside, other=0.0).to(tl.float32)
        if KIND == CLAMPED_SWIGLU:
            up = (tl.minimum(tl.maximum(up, -MOST), MOST) + 1.0).to(out.dtype.element_ty).to(tl.float32)
        result = result.to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * size + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activate(
    gate: tl.tensor,  # [BLOCK] float32
    KIND: tl.constexpr,
) -> tl.tensor:  # [BLOCK] float32: gate / (1 + exp(-slope)), or of SIGMOID that without the gate
    slope = gate
    if KIND == GELU_TANH:
        slope = TWICE_ROOT * gate * (1.0 + CUBIC * gate * gate)
    if KIND == CLAMPED_SWIGLU:
        gate = tl.minimum(gate, MOST)
        slope = STEEP * gate
    if KIND == SIGMOID:
        gate = tl.full(gate.shape, 1.0, tl.float32)
    small = tl.exp(-tl.abs(slope))  # of a sign that cannot overflow
    return gate * tl.where(slope >= 0.0, 1.0, small) / (1.0 + small)
