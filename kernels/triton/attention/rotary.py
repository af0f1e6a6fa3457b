"""Rotary position embedding: a token per program, all its heads at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import num_warps, power_of_2


def rotary(
    x: Tensor,  # [num_tokens, num_heads, head_dim]
    cos: Tensor,  # [num_tokens, 1, head_dim], the two halves alike
    sin: Tensor,  # [num_tokens, 1, head_dim], the first half negated
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    num_tokens, num_heads, head_dim = x.shape
    out = x.new_empty(x.shape)
    heads, half = power_of_2(num_heads), power_of_2(head_dim // 2)
    turn_heads[(num_tokens,)](
        x, cos, sin, out, num_heads, x.stride(0), x.stride(1), cos.stride(0),
        HEADS=heads, HEAD_DIM=head_dim, HALF=half, num_warps=num_warps(heads * half),
    )  # fmt: skip
    return out


@triton.jit
def turn_heads(
    x: tl.tensor,  # [num_tokens, num_heads, head_dim]
    cos: tl.tensor,  # [num_tokens, head_dim]
    sin: tl.tensor,  # [num_tokens, head_dim]
    out: tl.tensor,  # [num_tokens, num_heads, head_dim], contiguous
    num_heads: int,
    stride: int,
    head_stride: int,
    angle_stride: int,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    held = (heads < num_heads) & (columns < HEAD_DIM // 2)
    first, second = load_halves(x + token * stride + heads * head_stride + columns, held, HEAD_DIM)
    angles = token * angle_stride + tl.arange(0, HALF)
    first, second = turn(first, second, cos + angles, sin + angles, HEAD_DIM, HALF)
    place = out + (token * num_heads + heads) * HEAD_DIM + columns
    tl.store(place, first.to(out.dtype.element_ty), mask=held)
    tl.store(place + HEAD_DIM // 2, second.to(out.dtype.element_ty), mask=held)


@triton.jit
def load_halves(
    places: tl.tensor,  # [HEADS, HALF] pointers to the first half
    held: tl.tensor,  # [HEADS, HALF] bool
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # each [HEADS, HALF] float32
    first = tl.load(places, mask=held, other=0.0).to(tl.float32)
    second = tl.load(places + HEAD_DIM // 2, mask=held, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def turn(
    first: tl.tensor,  # [HEADS, HALF] float32
    second: tl.tensor,  # [HEADS, HALF] float32
    cos: tl.tensor,  # [HALF] pointers
    sin: tl.tensor,  # [HALF] pointers; the first half is negated
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # each [HEADS, HALF] float32
    real = tl.arange(0, HALF) < HEAD_DIM // 2
    cosine = tl.load(cos, mask=real, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + HEAD_DIM // 2, mask=real, other=0.0).to(tl.float32)[None, :]
    return first * cosine - second * sine, second * cosine + first * sine
