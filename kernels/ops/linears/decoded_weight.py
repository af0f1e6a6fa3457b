"""Codes as matrix units read them that decode while they multiply: Triton's packing of `kernels.ops.linears.codes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.ops.linears.codes import E2M1, Codes

SLABS = (64, 32, 16)  # input features whose codes have the same bits of their words: the most that a group holds whole
LONG = 64  # a slab of integers alone, for which it was measured, where blocks need no padding
WORD = 32  # bits
INTEGERS, FLOATS, OCTETS = 0, 1, 2  # codes of 4 bits, of E2M1, and E4M3
NARROW = (torch.bfloat16, torch.float16)  # of scales: powers of two fit the first, numbers of 16 bits one of them


@dataclass(frozen=True, slots=True)
class DecodedWeight:
    """Bits b i ... b i + b - 1 of a block's word j are feature `slab` i + j: a block of codes of b bits is 32 / b
    products of `slab` features, each with one scale.  Weights of experts are stacked: one more axis is first."""

    codes: Tensor  # [blocks x slab, out_features] int32
    scales: Tensor  # [num_groups, out_features] float32; of stacked weights also one of NARROW
    zeros: Tensor  # [num_groups, out_features] uint8; one that is not read where codes are no INTEGERS
    kind: int
    bits: int  # of a code: 4 or 8
    group: int
    slab: int
    out_features: int
    in_features: int

    @property
    def num_blocks(self) -> int:
        return self.codes.shape[-2] // self.slab

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes


def pack_decoded(codes: Codes, slabs: Sequence[int] = SLABS) -> DecodedWeight:
    """With one of `slabs`.  Raises ValueError for what is not decoded."""
    (rows, columns), group = codes.shape, min(codes.group, codes.shape[1])
    slab = _slab(slabs, columns, group, is_integer=codes.bits == 4 and codes.table is None)
    if codes.gather is not None or not slab:
        raise ValueError(f"groups must be multiples of {SLABS[-1]} input features, in their order")
    scales = codes.scales.t().contiguous()
    none = torch.zeros(1, dtype=torch.uint8, device=scales.device)
    if codes.codes.dtype == torch.float8_e4m3fn:
        words = _words(codes.codes.view(torch.uint8), 8, slab)
        return DecodedWeight(words, scales, none, OCTETS, 8, group, slab, rows, columns)
    if codes.bits != 4 or (codes.table is not None and not torch.equal(codes.table.cpu(), E2M1)):
        raise ValueError("codes must be integers of 4 bits, E2M1 or E4M3")
    words = _words(codes.codes, 4, slab)
    if codes.table is not None:
        return DecodedWeight(words, scales, none, FLOATS, 4, group, slab, rows, columns)
    zeros = torch.zeros_like(codes.scales, dtype=torch.uint8) if codes.zeros is None else codes.zeros
    return DecodedWeight(words, scales, zeros.t().contiguous(), INTEGERS, 4, group, slab, rows, columns)


def stack_decoded(weights: Sequence[DecodedWeight]) -> DecodedWeight:
    """Weights of experts as one, with scales in the narrowest format that holds all of them exactly: of groups of 16 or
    32 codes they are much of the memory.  Raises ValueError where the weights are not of one kind, group and shape."""
    first = weights[0]
    if len({(one.kind, one.group, one.out_features, one.in_features) for one in weights}) > 1:
        raise ValueError("weights of experts must be of the same kind, group and shape to be one")
    codes, scales, zeros = (
        torch.stack(each) for each in zip(*((one.codes, one.scales, one.zeros) for one in weights), strict=True)
    )
    return replace(first, codes=codes, scales=_narrowed(scales), zeros=zeros)


def _narrowed(scales: Tensor) -> Tensor:
    narrow = (scales.to(dtype) for dtype in NARROW)
    return next((one for one in narrow if torch.equal(one.float(), scales)), scales)


def _slab(slabs: Sequence[int], columns: int, group: int, *, is_integer: bool) -> int:
    """0 where groups are too small."""
    sizes = (size for size in slabs if group == columns or group % size == 0)
    return next((size for size in sizes if size != LONG or (is_integer and columns % (LONG * WORD // 4) == 0)), 0)


def _words(
    codes: Tensor,  # [out_features, in_features] uint8
    bits: int,
    slab: int,
) -> Tensor:  # as DecodedWeight has them
    rows, columns = codes.shape
    slabs = WORD // bits
    blocks = -(-columns // (slabs * slab))
    padded = torch.nn.functional.pad(codes, (0, blocks * slabs * slab - columns)).view(rows, blocks, slabs, slab)
    words = torch.zeros(rows, blocks, slab, dtype=torch.int32, device=codes.device)
    for index in range(slabs):
        words |= padded[:, :, index].int() << bits * index
    return words.view(rows, -1).t().contiguous()
