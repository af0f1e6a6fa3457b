"""Which weights share a scale: all, those of an output feature, of a group of input features, or of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.description.names import Shape
from engine.weights.quantised.form import Matrix, SchemeKeys
from shared.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

ALL = -1
ANY = 0  # of rows: all or one, as the checkpoint has it
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True, slots=True)
class Grid:
    rows: int  # output features that share a scale
    columns: int = ALL  # input features that share one

    @property
    def label(self) -> str:
        if self.rows in (ALL, ANY):
            return "a scale per matrix" if self.rows == ALL else "a scale per matrix or channel"
        if self.rows > 1:
            return f"blocks of {self.rows} x {self.columns}"
        return "a scale per channel" if self.columns == ALL else f"groups of {self.columns}"

    def shapes(self, matrix: Matrix) -> tuple[Shape, ...]:
        """In which scales are stored.  Edges of blocks may be cut off."""
        whole: tuple[Shape, ...] = ((1,), (), (1, 1))
        each: tuple[Shape, ...] = ((matrix.rows, 1), (matrix.rows,))
        if self.rows in (ALL, ANY):
            return whole if self.rows == ALL else whole + each
        if self.columns == ALL:
            return each
        return ((-(-matrix.rows // self.rows), -(-matrix.columns // self.columns)),)

    def group(self, matrix: Matrix) -> int:
        return matrix.columns if self.columns == ALL else self.columns

    def spread(self, scales: Tensor, matrix: Matrix) -> Tensor:  # [rows, groups]
        """Of scales in one of the shapes, those of each output feature."""
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(matrix.rows, -(-matrix.columns // self.group(matrix))).contiguous()
        if self.columns == ALL:
            return scales.reshape(matrix.rows, 1)
        return scales.repeat_interleave(self.rows, 0)[: matrix.rows]


def read_grid(keys: SchemeKeys) -> Grid:
    """Of compressed-tensors' `strategy`, `group_size` and `block_structure`."""
    group = keys.group("group_size", default=ALL)
    strategy = keys.one_of("strategy", STRATEGIES, "channel" if group == ALL else "group")
    if strategy == "tensor":
        return Grid(ALL)
    if strategy == "channel":
        return Grid(1)
    return Grid(1, group) if strategy != "block" else read_blocks(keys, "block_structure")


def read_blocks(keys: SchemeKeys, key: str) -> Grid:
    """Two integers, output features first."""
    value = keys.get(key)
    try:
        rows, columns = (int(size) for size in (value.split("x") if isinstance(value, str) else value))
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise ModelError(f"{keys.path}.{key} must be two positive integers, got {value!r}")
    return Grid(rows, columns)
