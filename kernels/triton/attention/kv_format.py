"""How a KV cache is scaled, and the rounding of what is stored in it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.attention.kv_cache import KVCache
from kernels.triton.linears.quantise import LEVELS, round_fp8, round_product

PLAIN, PER_HEAD, PER_TOKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def scales_of(cache: KVCache) -> tuple[Tensor, Tensor, int]:
    if cache.key_scales is not None and cache.value_scales is not None:
        return cache.key_scales, cache.value_scales, PER_TOKEN.value
    if cache.key_head_scales is not None and cache.value_head_scales is not None:
        return cache.key_head_scales, cache.value_head_scales, PER_HEAD.value
    return cache.keys, cache.values, PLAIN.value


@triton.jit
def scale_places(
    scales: tl.tensor,  # [num_blocks, block_size, num_kv_heads] in int8, [num_kv_heads] in fp8
    slot: tl.tensor,
    heads: tl.tensor,  # [HEADS]
    num_kv_heads: int,
    SCALED: tl.constexpr,
) -> tl.tensor:  # [HEADS] pointers
    places = scales + heads
    if SCALED == PER_TOKEN:
        places = places + slot * num_kv_heads
    return places


@triton.jit
def store_heads(
    x: tl.tensor,  # [HEADS, WIDTH] float32: of one token
    largest: tl.tensor,  # [HEADS] float32: the largest magnitude of each head
    held: tl.tensor,  # [HEADS, WIDTH] bool
    cache: tl.tensor,  # [HEADS, WIDTH] pointers
    scales: tl.tensor,  # [HEADS] pointers: written in int8, read in fp8
    heads: tl.tensor,  # [HEADS] bool: which there are
    SCALED: tl.constexpr,
) -> None:
    if SCALED == PER_TOKEN:
        factor = tl.where(largest > 0.0, tl.div_rn(LEVELS, tl.where(largest > 0.0, largest, 1.0)), 0.0)
        tl.store(cache, round_product(x, tl.broadcast_to(factor[:, None], x.shape)).to(tl.int8), mask=held)
        tl.store(scales, tl.div_rn(largest, LEVELS), mask=heads)
    elif SCALED == PER_HEAD:
        scale = tl.load(scales, mask=heads, other=1.0)
        tl.store(cache, round_fp8(tl.div_rn(x, scale[:, None])).to(cache.dtype.element_ty), mask=held)
    else:
        tl.store(cache, x.to(cache.dtype.element_ty), mask=held)
