"""RMSNorm, alone and with the residual add before it: one program per row, one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import num_warps, power_of_2, wait_for_others, when


def rms_norm(
    x: Tensor,  # [..., hidden_size]
    weight: Tensor,  # [hidden_size]
    eps: float,
    *,
    early: bool = False,  # as `launch.when` has it
) -> Tensor:  # [..., hidden_size]
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_2(size)
    norm_rows[(len(rows),)](
        rows, rows, weight, out, out, size, rows.stride(0), rows.stride(0), eps,
        ADD=False, BLOCK=block, num_warps=num_warps(block), **when(early, rows),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor,  # [..., hidden_size]
    residual: Tensor,  # [..., hidden_size]
    weight: Tensor,  # [hidden_size]
    eps: float,
    *,
    early: bool = False,
) -> tuple[Tensor, Tensor]:  # the norm of the sum, and the sum: the next residual
    size = x.shape[-1]
    rows, others = x.reshape(-1, size), residual.reshape(-1, size)
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    block = power_of_2(size)
    norm_rows[(len(rows),)](
        rows, others, weight, out, total, size, rows.stride(0), others.stride(0), eps,
        ADD=True, BLOCK=block, num_warps=num_warps(block), **when(early, rows),
    )  # fmt: skip
    return out, total


@triton.jit
def norm_rows(
    x: tl.tensor,  # [num_rows, size]
    residual: tl.tensor,  # [num_rows, size]; read where ADD
    weight: tl.tensor,  # [size]
    out: tl.tensor,  # [num_rows, size], contiguous
    summed: tl.tensor,  # [num_rows, size], contiguous; written where ADD
    size: int,
    x_stride: int,
    residual_stride: int,
    eps: float,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_others(EARLY)
    wide = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        total = wide.to(summed.dtype.element_ty)  # rounded as it is stored, so that the norm is that of the residual
        tl.store(summed + row * size + columns, total, mask=inside)
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + columns, (normed * factor).to(out.dtype.element_ty), mask=inside)
