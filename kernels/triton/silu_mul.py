"""The gated activation silu(gate) * up: a stretch of a row per program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import num_warps, power_of_2

LONGEST = 2048  # elements of a program


def silu_mul(
    gate_up: Tensor,  # [num_tokens, 2 * intermediate_size], the gates first
) -> Tensor:  # [num_tokens, intermediate_size]
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    block = min(LONGEST, power_of_2(size))
    multiply_gates[(num_tokens, triton.cdiv(size, block))](
        gate_up, out, size, gate_up.stride(0), BLOCK=block, num_warps=num_warps(block)
    )
    return out


@triton.jit
def multiply_gates(
    gate_up: tl.tensor,  # [num_tokens, 2 * size]
    out: tl.tensor,  # [num_tokens, size], contiguous
    size: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + columns, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # of a sign that cannot overflow
    gated = gate * tl.where(gate >= 0.0, 1.0, small) / (1.0 + small)
    gated = gated.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + columns, (gated * up).to(out.dtype.element_ty), mask=inside)
