"""FP8 weights with scales by matrix, channel, group or block, as DeepSeek, Qwen and others publish them.

A scale multiplies, also where its name says `inv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.weights.quantised.form import SIXTEEN, Matrix, Quantisation, Same, SchemeKeys, StoredCodes, Tensors
from engine.weights.quantised.grid import ANY, Grid, read_blocks

if TYPE_CHECKING:
    from engine.weights.quantised.module_tensors import ModuleTensors
    from kernels.ops.linears.codes import Codes

BITS = 8
POWERS = ("U8", "F8_E8M0")  # formats of scales that are powers of two
SCALE, INVERSE = ".weight_scale", ".weight_scale_inv"
INPUTS = (".input_scale", ".activation_scale", ".input_zero_point", ".input_global_scale")


@dataclass(frozen=True, slots=True)
class Float8:
    grid: Grid
    scale: str = SCALE  # names between `|`: a checkpoint has one of them
    powers: bool = False  # scales are powers of two

    @property
    def label(self) -> str:
        return f"{BITS} bits (E4M3), {self.grid.label}"

    def stored(self, matrix: Matrix) -> Mapping[str, Tensors]:
        return {
            ".weight": Tensors(("F8_E4M3",), ((matrix.rows, matrix.columns),)),
            self.scale: Tensors(POWERS if self.powers else (*SIXTEEN, "F8_E8M0"), self.grid.shapes(matrix)),
            **input_tensors(matrix),
        }

    def codes(self, matrix: Matrix, suffixes: Sequence[str]) -> StoredCodes:
        return StoredCodes(BITS, self.grid.group(matrix), symmetric=True, is_float=True, powers=self.powers)

    def read(self, tensors: ModuleTensors, matrix: Matrix) -> Codes:
        from kernels.ops.linears.codes import Codes

        suffix = next(name for name in self.scale.split("|") if tensors.get(name) is not None)
        is_power = self.powers or tensors[suffix].element_size() == 1
        scales = tensors.powers(suffix) if is_power else tensors.scales(suffix)
        return Codes(tensors[".weight"], self.grid.spread(scales, matrix), self.grid.group(matrix), BITS)


def input_tensors(matrix: Matrix) -> dict[str, Tensors]:
    """What a checkpoint may say of activations, which stay as they are here."""
    shapes = ((), (1,), (1, 1), (matrix.columns,))
    return {name: Tensors((*SIXTEEN, "I8", "F8_E4M3"), shapes, optional=True) for name in INPUTS}


def read_fp8(keys: SchemeKeys) -> Quantisation:
    """Modules that are left as they are have a plain weight."""
    keys.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    keys.one_of("expert_dtype", ("fp8",), "fp8")
    keys.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    either = f"{INVERSE}|{SCALE}"
    has_blocks = keys.get("weight_block_size") is not None
    grid = read_blocks(keys, "weight_block_size") if has_blocks else Grid(ANY)
    return Quantisation("FP8", Same(Float8(grid, either)), rounds_activations=True)
