"""The threshold of each row without sorting it: bisection over the bits of float32, one program per row.

Floats are ordered as unsigned integers are, once negative ones are turned over: 32 sums settle the boundary's bits.
They go over those tokens only that are near the most likely one, gathered into a row of their own, where these are few
and have what is wanted: as they have wherever a model has an opinion.  Masses are summed in float64 along one row only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CAPACITY = 4096  # candidates
BLOCK = 2048  # tokens looked at together
NEAR, FAR = tl.constexpr(4.0), tl.constexpr(12.0)  # nats below the most likely token, within which candidates are
ALWAYS = tl.constexpr(float("-inf"))


def truncation(
    values: Tensor,  # [num_rows, vocab_size] float32: processed logits / temperature
    depth: Tensor,  # [num_rows] float64: log(min_p); -inf: off
    top_k: Tensor,  # [num_rows] int64; 0: off
    top_p: Tensor,  # [num_rows] float64; 1: off
) -> tuple[Tensor, Tensor]:  # cut [num_rows] float32, last_tied [num_rows] int64: vocab_size where nothing is dropped
    num_rows, vocab_size = values.shape
    cut = torch.empty(num_rows, dtype=torch.float32, device=values.device)
    last_tied = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    room = torch.empty(num_rows, CAPACITY, dtype=torch.float32, device=values.device)
    truncate_rows[(num_rows,)](
        values, depth, top_k, top_p, cut, last_tied, room, vocab_size, values.stride(0),
        CAPACITY=CAPACITY, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return cut, last_tied


@triton.jit
def truncate_rows(
    values: tl.tensor,  # [num_rows, vocab_size] float32
    depths: tl.tensor,  # [num_rows] float64
    top_ks: tl.tensor,  # [num_rows] int64
    top_ps: tl.tensor,  # [num_rows] float64
    cuts: tl.tensor,  # [num_rows] float32
    lasts: tl.tensor,  # [num_rows] int64
    rooms: tl.tensor,  # [num_rows, CAPACITY] float32
    vocab_size: int,
    stride: int,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    depth, top_k, top_p = tl.load(depths + row), tl.load(top_ks + row), tl.load(top_ps + row)
    source, room = values + row * stride, rooms + row * CAPACITY
    limited = (top_k > 0) & (top_k < vocab_size)
    cut = tl.full((), float("-inf"), tl.float32)
    last = tl.full((), 0, tl.int64) + vocab_size
    if limited | (top_p < 1.0) | (depth > float("-inf")):
        peak = largest(source, vocab_size, BLOCK)
        if peak > float("-inf"):
            if depth > float("-inf"):
                cut = (peak.to(tl.float64) + depth).to(tl.float32)
            if limited:
                wanted = top_k.to(tl.float64)
                kth = boundary(source, room, vocab_size, wanted, peak, ALWAYS, False, CAPACITY, BLOCK)
                cut = tl.maximum(cut, kth)
            if top_p < 1.0:
                wanted = top_p * weight(source, vocab_size, peak, cut, ALWAYS, True, BLOCK)
                floor = cut
                cut = boundary(source, room, vocab_size, wanted, peak, floor, True, CAPACITY, BLOCK)
                last = last_kept_tie(source, vocab_size, wanted, peak, floor, cut, BLOCK)
    tl.store(cuts + row, cut)
    tl.store(lasts + row, last)


@triton.jit
def largest(
    source: tl.tensor,  # [size] float32
    size: int,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(source + places, mask=places < size, other=float("-inf")))
    return tl.max(best, 0)


@triton.jit
def weight(
    source: tl.tensor,  # [size] float32
    size: int,
    peak: float,
    floor: float,
    above: float,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # float64: mass, or number, of the values that are at least `floor` and at least `above`
    held = tl.full((BLOCK,), 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        value = tl.load(source + places, mask=places < size, other=float("-inf"))
        kept = (value >= floor) & (value >= above) & (places < size)
        one = tl.exp(value - peak) if MASS else tl.full((BLOCK,), 1.0, tl.float32)
        held += tl.where(kept, one, 0.0).to(tl.float64)
    return tl.sum(held, 0)


@triton.jit
def boundary(
    source: tl.tensor,  # [size] float32
    room: tl.tensor,  # [CAPACITY] float32
    size: int,
    wanted: tl.tensor,  # float64
    peak: float,
    floor: float,
    MASS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # float32: the largest value such that it and all above it weigh at least what is wanted
    near = weight(source, size, peak, floor, peak - NEAR, MASS, BLOCK) >= wanted
    above = tl.where(near, peak - NEAR, peak - FAR)
    count = gather(source, room, size, above, CAPACITY, BLOCK)
    enough = near
    if count <= CAPACITY:
        tl.debug_barrier()
        enough = near | (weight(room, count, peak, floor, ALWAYS, MASS, BLOCK) >= wanted)
    found = tl.full((), 0, tl.uint32)
    if enough & (count <= CAPACITY):
        found = bisect(room, count, wanted, peak, floor, MASS, BLOCK)
    else:
        found = bisect(source, size, wanted, peak, floor, MASS, BLOCK)
    bits = tl.where(found >= 0x80000000, found ^ 0x80000000, ~found)
    tl.debug_barrier()  # the room may be used again
    return tl.maximum(bits.to(tl.float32, bitcast=True), floor)


@triton.jit
def gather(
    source: tl.tensor,  # [size] float32
    room: tl.tensor,  # [CAPACITY] float32, written
    size: int,
    above: float,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # int32: how many values are at least `above`; the room has the first of them
    count = tl.full((), 0, tl.int32)
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        value = tl.load(source + places, mask=places < size, other=float("-inf"))
        chosen = ((value >= above) & (places < size)).to(tl.int32)
        targets = count + tl.cumsum(chosen, 0) - chosen
        tl.store(room + targets, value, mask=(chosen > 0) & (targets < CAPACITY))
        count += tl.sum(chosen, 0)
    return count


@triton.jit
def bisect(
    source: tl.tensor,  # [size] float32
    size: int,
    wanted: tl.tensor,  # float64
    peak: float,
    floor: float,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # uint32: the boundary, in order
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32):
        trial = found | bit
        held = tl.full((BLOCK,), 0.0, tl.float64)
        for start in range(0, size, BLOCK):
            places = start + tl.arange(0, BLOCK)
            value = tl.load(source + places, mask=places < size, other=float("-inf"))
            kept = (in_order(value) >= trial) & (value >= floor) & (places < size)
            one = tl.exp(value - peak) if MASS else tl.full((BLOCK,), 1.0, tl.float32)
            held += tl.where(kept, one, 0.0).to(tl.float64)
        found = tl.where(tl.sum(held, 0) >= wanted, trial, found)
        bit = bit >> 1
    return found


@triton.jit
def in_order(
    value: tl.tensor,  # float32
) -> tl.tensor:  # uint32: larger where the value is
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, ~bits, bits ^ 0x80000000)


@triton.jit
def last_kept_tie(
    source: tl.tensor,  # [size] float32
    size: int,
    wanted: tl.tensor,  # float64
    peak: float,
    floor: float,
    cut: float,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # int64: the id of the last of those equal to the cut that are needed for the mass
    above = tl.full((BLOCK,), 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        value = tl.load(source + places, mask=places < size, other=float("-inf"))
        above += tl.where((value > cut) & (value >= floor), tl.exp(value - peak), 0.0).to(tl.float64)
    needed = tl.ceil((wanted - tl.sum(above, 0)) / tl.exp(cut - peak).to(tl.float64))
    needed = tl.maximum(needed, 1.0).to(tl.int32)
    seen = tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int32) + (size - 1)
    for start in range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        value = tl.load(source + places, mask=places < size, other=float("-inf"))
        equal = ((value == cut) & (places < size)).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        last = tl.minimum(last, tl.min(tl.where((equal > 0) & (rank == needed), places, size - 1), 0))
        seen += tl.sum(equal, 0)
    return last.to(tl.int64)
