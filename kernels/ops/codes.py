"""A quantised weight in the one form into which every checkpoint's format is read, and from which each provider packs.

w[n, k] = (value(codes[n, k]) - zeros[n, g]) * scales[n, g],  g = k // group
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# How weights of 4 bits are held: with zeros that are all 8 and scales that float16 can hold, or with any.
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
ZERO = 8
LARGEST_SCALE = 65504.0  # of float16


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

    def _by_column(self, groups: Tensor) -> Tensor:  # [out_features, in_features]
        return groups.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]


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
