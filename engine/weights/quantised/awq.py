"""AWQ's layout for matrix products ("gemm"): codes and zeros along the output features, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.weights.quantised.form import (
    SIXTEEN,
    Matrix,
    Quantisation,
    Same,
    SchemeKeys,
    StoredCodes,
    Tensors,
    describe_group,
    groups_of,
    words,
)

if TYPE_CHECKING:
    from torch import Tensor

    from engine.weights.quantised.module_tensors import ModuleTensors
    from kernels.ops.linears.codes import Codes

BITS = 4
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the nibbles of a word: output feature j of eight is nibble PLACES[j]


@dataclass(frozen=True, slots=True)
class Awq:
    group: int

    @property
    def label(self) -> str:
        return f"{BITS} bits, {describe_group(self.group)}"

    def stored(self, matrix: Matrix) -> Mapping[str, Tensors]:
        groups, packed = groups_of(matrix, self.group), words(matrix.rows, BITS, "output features")
        return {
            ".qweight": Tensors(("I32",), ((matrix.columns, packed),)),
            ".qzeros": Tensors(("I32",), ((groups, packed),)),
            ".scales": Tensors(SIXTEEN, ((groups, matrix.rows),)),
        }

    def codes(self, matrix: Matrix, suffixes: Sequence[str]) -> StoredCodes:
        return StoredCodes(BITS, matrix.columns if self.group == -1 else self.group, symmetric=False)

    def read(self, tensors: ModuleTensors, matrix: Matrix) -> Codes:
        from kernels.ops.linears.codes import Codes

        return Codes(
            codes=_in_order(tensors[".qweight"]).t().contiguous(),
            scales=tensors.scales(".scales").t().contiguous(),
            group=matrix.columns if self.group == -1 else self.group,
            bits=BITS,
            zeros=_in_order(tensors[".qzeros"]).t().contiguous(),
        )


def _in_order(words: Tensor) -> Tensor:  # [n, rows / 8] int32 -> [n, rows] uint8
    from engine.weights.quantised.module_tensors import unpacked

    return unpacked(words[:, :, None], BITS)[:, :, list(PLACES)].flatten(1)


def read_awq(keys: SchemeKeys) -> Quantisation:
    """Modules that are not converted are those with a plain weight: older writers leave the list empty."""
    keys.bits("bits", "w_bit", served=(BITS,))
    version = str(keys.get("version") or "gemm").lower()
    if version != "gemm":
        raise keys.fault("version", f"is {version!r}, which is not served; served: gemm")
    return Quantisation("AWQ", Same(Awq(keys.group("group_size", "q_group_size"))))
