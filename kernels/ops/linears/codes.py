"""A quantised weight in the one form into which every checkpoint's format is read, and from which each provider packs.

w[n, k] = (value(codes[n, k]) - zeros[n, g]) * scales[n, g],  g = k // group
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# How weights of 4 bits are held: with zeros that are all 8 and scales that float16 can hold, or with any.
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
ZERO = 8
MIDDLE = 128  # of octets: the zero of int8
LARGEST_SCALE = 65504.0  # of float16
# FP4, E2M1: the sign is the highest bit of four.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@dataclass(frozen=True, slots=True)
class Codes:
    codes: Tensor  # [out_features, in_features] uint8, or float8_e4m3fn where the value is the number itself
    scales: Tensor  # [out_features, num_groups] float32
    group: int  # input features of a scale; the last group may have fewer
    bits: int  # of a code as it is stored: 4 or 8
    zeros: Tensor | None = None  # [out_features, num_groups] uint8; none: 0
    table: Tensor | None = None  # [2 ** bits] float32: the value of each code; none: the code itself
    gather: Tensor | None = None  # [in_features] int64: column k is of input feature gather[k]; none: of k

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def values(self) -> Tensor:  # [out_features, in_features] float32, before zeros and scales
        if self.table is None:
            return self.codes.float()
        return self.table.index_select(0, self.codes.flatten().long()).view(self.codes.shape)

    def dequantised(self) -> Tensor:  # [out_features, in_features] float32, in the order of the input features
        columns = self.codes.shape[1]
        values = self.values()
        if self.zeros is not None:
            values = values - self._by_column(self.zeros.float())
        values = values * self._by_column(self.scales)
        if self.gather is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.gather[:columns], values)

    def to(self, device: torch.device) -> Codes:
        tensors = {name: getattr(self, name) for name in ("codes", "scales", "zeros", "table", "gather")}
        moved = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
        return replace(self, **moved)

    def _by_column(self, groups: Tensor) -> Tensor:  # [out_features, in_features]
        return groups.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]


def is_int8(codes: Codes) -> bool:
    """Whether it is int8 with a scale for each output feature, as `kernels.ops.linears.linear_int8` multiplies it."""
    if codes.bits != 8 or codes.codes.dtype != torch.uint8 or codes.table is not None or codes.gather is not None:
        return False
    return codes.group >= codes.shape[1] and codes.zeros is not None and bool((codes.zeros == MIDDLE).all())


def same_order(parts: Sequence[Codes]) -> bool:
    """Whether all of them take input features in one order."""
    orders = [part.gather for part in parts]
    first = orders[0]
    if first is None:
        return all(order is None for order in orders)
    return all(order is not None and torch.equal(order, first) for order in orders)


def joined(parts: Sequence[Codes]) -> Codes:
    """One below the other: of the same bits, groups and order, and all with zeros or none, and no table."""
    zeros = [part.zeros for part in parts if part.zeros is not None]
    if len({(part.bits, part.group, part.shape[1], part.table is None) for part in parts}) > 1 or not same_order(parts):
        raise ValueError("parts of one weight must have the same bits, input features, groups and order")
    if len(zeros) not in (0, len(parts)):
        raise ValueError("parts of one weight must all have zeros, or none")
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def quantise_to_codes(
    weight: Tensor,  # [out_features, in_features]
    group: int,
) -> Codes:
    """Symmetric, round to nearest, 4 bits: codes 0 to 15 around 8, the largest |w| of a group at -8 or 8.

    Scales are numbers that float16 can hold.
    """
    rows, columns = weight.shape
    groups = -(-columns // group)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group - columns)).view(rows, groups, group)
    largest = padded.gather(2, padded.abs().argmax(2, keepdim=True)).squeeze(2)
    scales = (largest / -8).clamp(-LARGEST_SCALE, LARGEST_SCALE).half().float()
    inverse = torch.where(scales == 0, 0, 1 / scales)
    codes = (padded * inverse[:, :, None]).round().add_(ZERO).clamp_(0, 15).to(torch.uint8)
    zeros = torch.full((rows, groups), ZERO, dtype=torch.uint8, device=weight.device)
    return Codes(codes.view(rows, -1)[:, :columns].contiguous(), scales, group, 4, zeros)
