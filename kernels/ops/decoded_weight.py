"""Codes as matrix units read them that decode while they multiply: Triton's packing of `kernels.ops.codes`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops.codes import E2M1, Codes

DEPTH = 128  # input features of a block
SLABS = 8  # codes of a word
SLAB = DEPTH // SLABS  # features whose codes have the same bits of their words
INTEGERS, FLOATS, OCTETS = 0, 1, 2  # codes of 4 bits, of E2M1, and E4M3


@dataclass(frozen=True, slots=True)
class DecodedWeight:
    """Bits 4 i ... 4 i + 3 of a block's word j are feature 16 i + j: a block is eight products of 16 features."""

    codes: Tensor  # [in_features / 8, out_features] int32, whole blocks; of OCTETS float8 [out_features, in_features]
    scales: Tensor  # [num_groups, out_features] float32
    zeros: Tensor  # [num_groups, out_features] uint8, of INTEGERS
    kind: int
    group: int
    out_features: int
    in_features: int


def pack_decoded(codes: Codes) -> DecodedWeight:
    """Raises ValueError for what is not decoded."""
    (rows, columns), group = codes.shape, min(codes.group, codes.shape[1])
    if codes.gather is not None or (group < columns and group % SLAB):
        raise ValueError(f"groups must be multiples of {SLAB} input features, in their order")
    scales = codes.scales.t().contiguous()
    if codes.codes.dtype == torch.float8_e4m3fn:
        none = torch.zeros(1, dtype=torch.uint8, device=scales.device)
        return DecodedWeight(codes.codes.contiguous(), scales, none, OCTETS, group, rows, columns)
    if codes.bits != 4 or (codes.table is not None and not torch.equal(codes.table.cpu(), E2M1)):
        raise ValueError("codes must be integers of 4 bits, E2M1 or E4M3")
    blocks = -(-columns // DEPTH)
    padded = torch.nn.functional.pad(codes.codes, (0, blocks * DEPTH - columns)).view(rows, blocks, SLABS, SLAB)
    words = torch.zeros(rows, blocks, SLAB, dtype=torch.int32, device=scales.device)
    for slab in range(SLABS):
        words |= padded[:, :, slab].int() << 4 * slab
    zeros = torch.zeros_like(codes.scales, dtype=torch.uint8) if codes.zeros is None else codes.zeros
    kind = INTEGERS if codes.table is None else FLOATS
    held = words.view(rows, -1).t().contiguous()
    return DecodedWeight(held, scales, zeros.t().contiguous(), kind, group, rows, columns)
