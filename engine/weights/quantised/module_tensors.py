"""The stored tensors of one quantised matrix, and the steps that formats share in reading them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.errors import ModelError

NO_SCALE = 255  # of scales that are powers of two: not a number
HALF_OCTET = 4
MANTISSA_BITS = 23  # of float32


class ModuleTensors:
    """By what stands behind the module's name."""

    def __init__(self, module: str, tensors: Mapping[str, Tensor]) -> None:
        self.module = module
        self._tensors = tensors

    def __getitem__(self, suffix: str) -> Tensor:
        return self._tensors[suffix]

    def get(self, suffix: str) -> Tensor | None:
        return self._tensors.get(suffix)

    def fault(self, suffix: str, text: str) -> ModelError:
        return ModelError(f"tensor {self.module}{suffix} {text}")

    def scales(self, suffix: str, *, may_vanish: bool = False) -> Tensor:  # float32
        """Scales that are numbers.  Raises ModelError where one is not finite, or zero and may not be."""
        found = self[suffix].float()
        if not bool(found.isfinite().all()):
            raise self.fault(suffix, "holds scales that are not finite")
        if not may_vanish and not bool(found.all()):
            raise self.fault(suffix, "holds scales that are zero")
        return found

    def powers(self, suffix: str) -> Tensor:  # float32
        """Scales that are powers of two: 2 ** (byte - 127)."""
        stored = self[suffix].view(torch.uint8)
        if bool((stored == NO_SCALE).any()):
            raise self.fault(suffix, "holds scales that are not numbers")
        exponents = stored.int() << MANTISSA_BITS
        return exponents.masked_fill_(stored == 0, 1 << (MANTISSA_BITS - 1)).view(torch.float32)  # 2 ** -127

    def order(self, suffix: str, columns: int, group: int) -> Tensor | None:  # [columns] int64
        """Which input feature stands where once those of a group are neighbours; none: they are already."""
        index = self.get(suffix)
        if index is None:
            return None
        expected = torch.arange(columns, dtype=torch.int64) // group
        if torch.equal(index.long(), expected):
            return None
        order = torch.argsort(index, stable=True)
        if not torch.equal(index.long()[order], expected):
            raise self.fault(suffix, f"does not give {columns} input features to groups of {group}")
        return order


def unpacked(words: Tensor, bits: int) -> Tensor:  # [..., n] int32 -> [..., n * 32 / bits] uint8
    """Codes of 4 or 8 bits, the lowest first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else nibbles(octets)


def nibbles(octets: Tensor) -> Tensor:  # [..., n] uint8 -> [..., 2 n] uint8
    """Codes of 4 bits, the lower first."""
    return torch.stack((octets & 15, octets >> HALF_OCTET), -1).flatten(-2)
