"""Adapters packed for the native kernels: what `PgLora` in native/pageant.h says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.native import Native
from kernels.cpu.binding.packing import FORMATS
from kernels.ops.linears.lora import LoraPart

CHUNK = 32  # features of A that lie together
COLUMNS = 32  # of a packed panel, at most

Take = Callable[[int], Tensor]  # so many bytes at a multiple of 64, all of which are written: [size] uint8


def new_bytes(size: int) -> Tensor:  # [size] uint8
    return torch.empty(size, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class PackedLora:
    """One linear's, and the tensors that the structure points at."""

    struct: abi.PgLora
    held: tuple[Tensor, ...] = ()


NOTHING = PackedLora(abi.PgLora())


def packed_size(part: LoraPart, dtype: torch.dtype) -> int:
    """Bytes that a part takes."""
    return (_down_features(part) + _up_ranks(part) * part.out_features) * dtype.itemsize


def _down_features(part: LoraPart) -> int:
    return 0 if part.down is None else part.rank * (-(-part.down.shape[1] // CHUNK) * CHUNK)


def _up_ranks(part: LoraPart) -> int:
    return part.rank + part.rank % 2


def pack_lora(
    parts: Sequence[LoraPart],
    native: Native,
    dtype: torch.dtype,  # float32 or bfloat16
    take: Take = new_bytes,
) -> PackedLora:
    """Raises ValueError where vectors do not divide the output features, and for more parts than a linear joins."""
    if not any(part.rank for part in parts):
        return NOTHING
    if len(parts) > abi.LORA_PARTS:
        raise ValueError(f"{len(parts)} projections are joined, of which adapters change {abi.LORA_PARTS} at most")
    struct = abi.PgLora(num_parts=len(parts), format=FORMATS[dtype])
    held: list[Tensor] = []
    for own, part in zip(struct.parts, parts, strict=False):
        _check_vectors(part, native.lora_width)
        own.n, own.rank, own.scale = part.out_features, part.rank, part.scale
        if part.down is not None and part.up is not None:
            memory = take(packed_size(part, dtype))
            own.down = memory.data_ptr()
            own.up = own.down + _down_features(part) * dtype.itemsize
            native.pack_lora(_in_dtype(part.down, dtype), _in_dtype(part.up, dtype), own.down, own.up)
            held.append(memory)
    return PackedLora(struct, tuple(held))


def pack_embedding(
    part: LoraPart,  # A [rank, vocab_size]
    native: Native,
    dtype: torch.dtype,
) -> PackedLora:
    """Raises ValueError where vectors do not divide the hidden size."""
    _check_vectors(part, native.lora_width)
    assert part.down is not None
    assert part.up is not None
    ranks = _up_ranks(part)
    table, up = torch.zeros(part.down.shape[1], ranks, dtype=dtype), torch.zeros(ranks * part.out_features, dtype=dtype)
    table[:, : part.rank] = part.down.t()
    native.pack_lora(None, _in_dtype(part.up, dtype), None, up.data_ptr())
    struct = abi.PgLora(num_parts=1, format=FORMATS[dtype])
    struct.parts[0] = abi.PgLoraPart(table.data_ptr(), up.data_ptr(), part.rank, part.out_features, part.scale)
    return PackedLora(struct, (table, up))


def _in_dtype(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return matrix if matrix.dtype == dtype else matrix.to(dtype)  # to() takes a microsecond to do nothing


def padded_columns(part: LoraPart) -> LoraPart:
    """With output features that do nothing behind its own, as panels have them."""
    assert part.up is not None
    missing = -part.out_features % COLUMNS
    up = torch.nn.functional.pad(part.up, (0, 0, 0, missing))
    return replace(part, out_features=part.out_features + missing, up=up)


def _check_vectors(part: LoraPart, width: int) -> None:
    if part.out_features % width:
        raise ValueError(f"{part.out_features} output features are no multiple of {width}")
