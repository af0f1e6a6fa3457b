"""LayerNorm: one program per row, one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import num_warps, power_of_2


def layer_norm(
    x: Tensor,  # [..., hidden_size]
    weight: Tensor,  # [hidden_size]
    bias: Tensor | None,  # [hidden_size]
    eps: float,
) -> Tensor:  # [..., hidden_size]
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_2(size)
    centre_rows[(len(rows),)](
        rows, weight, weight if bias is None else bias, out, size, rows.stride(0), eps,
        BIAS=bias is not None, BLOCK=block, num_warps=num_warps(block),
    )  # fmt: skip
    return out


@triton.jit
def centre_rows(
    x: tl.tensor,  # [num_rows, size]
    weight: tl.tensor,  # [size]
    bias: tl.tensor,  # [size]; read where BIAS
    out: tl.tensor,  # [num_rows, size], contiguous
    size: int,
    stride: int,
    eps: float,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    wide = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / size, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / size + eps)
    normed = (centred * scale).to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = (normed * factor).to(out.dtype.element_ty)
    if BIAS:
        added = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + added).to(out.dtype.element_ty)
    tl.store(out + row * size + columns, result, mask=inside)
