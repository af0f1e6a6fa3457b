"""Slots by expert, sorted on the device: the host never learns how many rows an expert has.

A slot is a row at one of its experts.  Tiles of slots that share an expert are found by each program for itself, from
where the experts' slots end; a launch has room for as many tiles as there can be, so that graphs can be made of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # slots looked at together


def sort_slots(
    ids: Tensor,  # [num_tokens, top_k] int64, contiguous
    count: int,  # experts
) -> tuple[Tensor, Tensor]:  # slots by expert, then in order [num_slots]; where each expert's end [count]: int32
    num_slots = ids.numel()
    order = torch.empty(num_slots, dtype=torch.int32, device=ids.device)
    ends = torch.empty(count, dtype=torch.int32, device=ids.device)
    gather_slots[(count,)](ids, order, ends, num_slots, BLOCK=BLOCK, num_warps=4)
    return order, ends


def most_tiles(num_slots: int, count: int, rows: int) -> int:
    """The most tiles that there can be, of up to `rows` slots of one expert: each expert's last may be nearly empty."""
    return (num_slots + min(num_slots, count) * (rows - 1)) // rows


@triton.jit
def gather_slots(
    ids: tl.tensor,  # [num_slots] int64
    order: tl.tensor,  # [num_slots] int32
    ends: tl.tensor,  # [count] int32
    num_slots: int,
    BLOCK: tl.constexpr,
) -> None:
    """One program per expert: it counts the slots of those before it, and then places its own."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, num_slots, BLOCK):
        inside = start + lanes < num_slots
        held = tl.load(ids + start + lanes, mask=inside, other=0)
        before += (inside & (held < expert)).to(tl.int32)
    place = tl.sum(before, 0)
    for start in range(0, num_slots, BLOCK):
        inside = start + lanes < num_slots
        held = tl.load(ids + start + lanes, mask=inside, other=0)
        own = (inside & (held == expert)).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - own, start + lanes, mask=own > 0)
        place += tl.sum(own, 0)
    tl.store(ends + expert, place)


@triton.jit
def find_tile(
    ends: tl.tensor,  # [count] int32
    tile: int,
    count: int,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # its expert, its first place in the order, and where the expert's end
    """A tile beyond the last has no places: its first is not before the end."""
    experts = tl.arange(0, EXPERTS)
    there = experts < count
    end = tl.load(ends + experts, mask=there, other=0)
    begin = tl.load(ends + experts - 1, mask=there & (experts > 0), other=0)
    tiles = tl.where(there, (end - begin + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(tiles, 0)
    own = (last > tile) & (last - tiles <= tile)
    expert = tl.sum(tl.where(own, experts, 0), 0)
    first = tl.sum(tl.where(own, begin + (tile - last + tiles) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(own, end, 0), 0)
