"""A float32 linear whose rows do not depend on how many rows are multiplied together.

A BLAS picks its blocking by the number of rows, so that the same row can come out different by a bit in another batch.
Two measures take that away where it was measured (MKL, AVX-512): rows padded to a multiple of 16, and input features
summed in chunks of at most 512, in order.  Other machines may differ, so every weight shape is checked once at load,
and falls back to smaller tiles of rows: 16 at a time, and at last one at a time, which is invariant by construction.

Nor does an output feature depend on how many are multiplied together, so that ranks which have some of them each
compute the bits of one process.  A BLAS (MKL, AVX2) sums otherwise for fewer than 12, so narrow weights are padded to
16; `columns_are_alone` checks it for the sizes of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kernels.ops.linears import linear as plain
from kernels.ops.linears.linear import LinearWeight

ROW_MULTIPLE = 16
CHUNK = 512  # input features summed by one call
LEAST_COLUMNS = 16  # output features of a call
MAX_TILE = 256  # rows; the check below covers all sizes of call that can happen
CHECKED_ROWS = (16, 32, 64, 112, 256)
CHECKED_SHIFTS = (0, 5)


class LinearPacker:
    """Packs weights; remembers which tile passed the check for each shape."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[int, int], int] = {}  # (out_features, in_features) -> rows

    def pack(
        self,
        weight: Tensor,  # [out_features, in_features] float32
    ) -> LinearWeight:
        missing = max(0, LEAST_COLUMNS - weight.shape[0])
        transposed = torch.nn.functional.pad(weight, (0, 0, 0, missing)).t() if missing else weight.t()
        chunks = tuple(transposed[start : start + CHUNK] for start in range(0, weight.shape[1], CHUNK))
        shape = (weight.shape[0], weight.shape[1])
        if shape not in self._tiles:
            self._tiles[shape] = largest_invariant_tile(chunks)
        return LinearWeight(weight, chunks, self._tiles[shape])


def linear(
    x: Tensor,  # [num_tokens, in_features] float32
    weight: LinearWeight,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
) -> Tensor:  # [num_tokens, out_features]
    num_rows = x.shape[0]
    padding = -num_rows % ROW_MULTIPLE
    if padding:
        x = torch.nn.functional.pad(x, (0, 0, 0, padding))
    out = x.new_empty(x.shape[0], weight.chunks[0].shape[1])
    for start in range(0, x.shape[0], weight.tile):
        _multiply(x[start : start + weight.tile], weight.chunks, out[start : start + weight.tile])
    if weight.out_features < out.shape[1]:
        out = out[:, : weight.out_features].contiguous()
    if bias is not None:
        out += bias
    return out[:num_rows]


linear_rounded = partial(plain.linear_rounded, multiply=linear)


def _multiply(
    x: Tensor,  # [rows, in_features]
    chunks: tuple[Tensor, ...],  # each [<= CHUNK, out_features]
    out: Tensor,  # [rows, out_features]
) -> None:
    torch.mm(x[:, :CHUNK], chunks[0], out=out)
    for index, chunk in enumerate(chunks[1:], start=1):
        out.addmm_(x[:, index * CHUNK : (index + 1) * CHUNK], chunk)


def largest_invariant_tile(
    chunks: tuple[Tensor, ...],  # each [<= CHUNK, out_features]
) -> int:
    """The most rows that can be multiplied at once with every row bitwise as in a call of 16."""
    in_features = sum(chunk.shape[0] for chunk in chunks)
    x = torch.randn(MAX_TILE, in_features, generator=torch.Generator().manual_seed(0))
    alone = x.new_empty(MAX_TILE, chunks[0].shape[1])
    for start in range(0, MAX_TILE, ROW_MULTIPLE):
        _multiply(x[start : start + ROW_MULTIPLE], chunks, alone[start : start + ROW_MULTIPLE])
    if not _rows_agree(x, chunks, alone, (ROW_MULTIPLE,)):
        return 1
    return MAX_TILE if _rows_agree(x, chunks, alone, CHECKED_ROWS) else ROW_MULTIPLE


def _rows_agree(
    x: Tensor,  # [MAX_TILE, in_features]
    chunks: tuple[Tensor, ...],  # each [<= CHUNK, out_features]
    alone: Tensor,  # [MAX_TILE, out_features]
    sizes: tuple[int, ...],
) -> bool:
    for size in sizes:
        for shift in CHECKED_SHIFTS:
            out = x.new_empty(size, alone.shape[1])
            _multiply(x.roll(shift, 0)[:size], chunks, out)
            if not torch.equal(out, alone.roll(shift, 0)[:size]):
                return False
    return True


def columns_are_alone(in_features: int, widths: Sequence[int]) -> bool:
    """Whether parts of a weight with so many output features each give the bits of the whole, at every size of call."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(sum(widths), in_features, generator=generator)
    x, packer = torch.randn(MAX_TILE, in_features, generator=generator), LinearPacker()
    whole, bounds = packer.pack(weight), pairwise(accumulate(widths, initial=0))
    parts = [(slice(*bound), packer.pack(weight[slice(*bound)].contiguous())) for bound in bounds]
    return all(
        torch.equal(linear(x[:rows], part), linear(x[:rows], whole)[:, columns])
        for rows in CHECKED_ROWS
        for columns, part in parts
    )
