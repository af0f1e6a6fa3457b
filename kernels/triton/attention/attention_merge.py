"""The parts of long contexts put together, each weighed by its log-sum-exp; a head's sink is added here, once."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention.attention_tiles import Tiles
from kernels.triton.launch import num_programs, power_of_2, wait_for_others, when

NOTHING = tl.constexpr(-1.0e30)  # the maximum before the first key: finite, so that differences are numbers
LOG2_E = math.log2(math.e)
TO_POWERS_OF_TWO = tl.constexpr(LOG2_E)
MERGED = 8  # parts that are merged at a time


def launch_merges(
    tiles: Tiles,
    out: Tensor,  # [num_tokens, num_heads, head_dim]
    partial: Tensor,  # [num_partials, num_heads, head_dim] float32
    lse: Tensor,  # [num_partials, num_heads] float32
    sinks: Tensor | None,  # [num_heads] float32
    early: bool,
) -> None:
    num_heads, head_dim = out.shape[1:]
    merge_parts[(num_programs(len(tiles.merges) * num_heads, out.device),)](
        partial, lse, lse if sinks is None else sinks, tiles.counts, tiles.merges, out, num_heads,
        HEAD_DIM=head_dim, WIDTH=power_of_2(head_dim), PARTS=MERGED, SINKS=sinks is not None, num_warps=2,
        **when(early, out),
    )  # fmt: skip


@triton.jit
def load_sinks(
    places: tl.tensor,  # pointers
    held: tl.tensor,  # bool
) -> tl.tensor:  # float32, of powers of two, and never below NOTHING
    return tl.maximum(tl.load(places, mask=held, other=0.0).to(tl.float32) * TO_POWERS_OF_TWO, NOTHING)


@triton.jit
def merge_parts(
    partial: tl.tensor,  # [num_partials, num_heads, head_dim] float32
    lse: tl.tensor,  # [num_partials, num_heads] float32
    sinks: tl.tensor,  # [num_heads] float32; read where SINKS
    counts: tl.tensor,  # [2] int32
    merges: tl.tensor,  # [num_merges, 3] int32
    out: tl.tensor,  # [num_tokens, num_heads, head_dim], contiguous
    num_heads: int,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_for_others(EARLY)
    columns = tl.arange(0, WIDTH)
    for item in range(tl.program_id(0), tl.load(counts + 1) * num_heads, tl.num_programs(0)):
        record = merges + (item // num_heads) * 3
        head = item % num_heads
        token = tl.load(record).to(tl.int64)
        first = tl.load(record + 1).to(tl.int64)
        num_parts = tl.load(record + 2)
        acc = tl.zeros((WIDTH,), tl.float32)
        total = 0.0
        peak = -1.0e30
        if SINKS:
            peak = load_sinks(sinks + head, True)
            total = 1.0
        for start in range(0, num_parts, PARTS):
            part = start + tl.arange(0, PARTS)
            real = part < num_parts
            places = (first + part) * num_heads + head
            sums = tl.load(lse + places, mask=real, other=NOTHING)
            new_peak = tl.maximum(peak, tl.max(sums, 0))
            weights = tl.where(real, tl.exp2(sums - new_peak), 0.0)
            held = real[:, None] & (columns < HEAD_DIM)[None, :]
            found = tl.load(partial + places[:, None] * HEAD_DIM + columns[None, :], mask=held, other=0.0)
            shrunk = tl.exp2(peak - new_peak)
            acc = acc * shrunk + tl.sum(found * weights[:, None], 0)
            total = total * shrunk + tl.sum(weights, 0)
            peak = new_peak
        result = (acc / total).to(out.dtype.element_ty)
        tl.store(out + (token * num_heads + head) * HEAD_DIM + columns, result, mask=columns < HEAD_DIM)
