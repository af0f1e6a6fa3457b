"""FP4 in groups: gpt-oss's stacks of experts, and matrices with two levels of scales (NVFP4).

Two codes in an octet, the lower nibble first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.weights.quantised.form import Matrix, Quantisation, Same, SchemeKeys, StoredCodes, Tensors
from engine.weights.quantised.fp8 import POWERS, input_tensors
from shared.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from engine.weights.quantised.module_tensors import ModuleTensors
    from kernels.ops.linears.codes import Codes

BITS = 4
MX_GROUP, NV_GROUP = 32, 16


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """gpt-oss: [experts, out_features, groups, 16] octets, and a power of two for each group."""

    @property
    def label(self) -> str:
        return f"{BITS} bits (E2M1), groups of {MX_GROUP}"

    def stored(self, matrix: Matrix) -> Mapping[str, Tensors]:
        if not matrix.experts:
            raise ModelError("only stacks of experts are stored so")
        groups = matrix.experts, matrix.rows, _groups(matrix, MX_GROUP)
        return {
            "_blocks": Tensors(("U8",), ((*groups, MX_GROUP // 2),)),
            "_scales": Tensors(POWERS, (groups,)),
        }

    def codes(self, matrix: Matrix, suffixes: Sequence[str]) -> StoredCodes:
        return StoredCodes(BITS, MX_GROUP, symmetric=True, is_float=True, powers=True)

    def read(self, tensors: ModuleTensors, matrix: Matrix) -> Codes:
        return _codes(tensors["_blocks"].flatten(-2), tensors.powers("_scales"), MX_GROUP)


@dataclass(frozen=True, slots=True)
class Float4:
    """One matrix, with powers of two for groups of 32, or numbers for groups of 16 and one for all of them."""

    group: int
    packed: str = ".weight_packed"
    whole: str = ""  # the scale of the whole matrix
    divides: bool = True  # it divides the groups' scales; else it multiplies them

    @property
    def label(self) -> str:
        return f"{BITS} bits (E2M1), groups of {self.group}"

    def stored(self, matrix: Matrix) -> Mapping[str, Tensors]:
        scales = matrix.rows, _groups(matrix, self.group)
        found = {
            self.packed: Tensors(("U8",), ((matrix.rows, matrix.columns // 2),)),
            ".weight_scale": Tensors(("F8_E4M3",) if self.whole else POWERS, (scales,)),
            **input_tensors(matrix),
        }
        if self.whole:
            found[self.whole] = Tensors(("F32",), ((1,), ()))
        return found

    def codes(self, matrix: Matrix, suffixes: Sequence[str]) -> StoredCodes:
        return StoredCodes(BITS, self.group, symmetric=True, is_float=True, powers=not self.whole)

    def read(self, tensors: ModuleTensors, matrix: Matrix) -> Codes:
        if not self.whole:
            return _codes(tensors[self.packed], tensors.powers(".weight_scale"), self.group)
        scales, whole = tensors.scales(".weight_scale", may_vanish=True), tensors.scales(self.whole)
        return _codes(tensors[self.packed], scales / whole if self.divides else scales * whole, self.group)


def _codes(octets: Tensor, scales: Tensor, group: int) -> Codes:
    from engine.weights.quantised.module_tensors import nibbles
    from kernels.ops.linears.codes import E2M1, Codes

    return Codes(nibbles(octets), scales, group, BITS, table=E2M1)


def _groups(matrix: Matrix, group: int) -> int:
    if matrix.columns % group:
        raise ModelError(f"{matrix.columns} input features are no multiple of groups of {group}")
    return matrix.columns // group


def read_mxfp4(keys: SchemeKeys) -> Quantisation:
    return Quantisation("MXFP4", Same(ExpertStack()))
