"""Packing weights into the panels that the native kernels multiply, and digests of what is read meanwhile."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.coded import CodedPacking, Coding, coding_of, read_codes
from kernels.cpu.binding.contents import address_of_sums, check, row_shape, rows_of
from kernels.ops import digest
from kernels.ops.digest import Sums
from kernels.ops.linears.codes import INT4, UINT4, ZERO, Codes, is_int8

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # PgFormat
KV_FORMATS = FORMATS | {torch.float8_e4m3fn: 5, torch.float8_e5m2: 6}
NIBBLES = {INT4: 3, UINT4: 4}
WEIGHT_FORMATS = FORMATS | NIBBLES
TOGETHER = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4} | dict.fromkeys(NIBBLES, 16)  # input features
COPIED = (  # by pg_copy: from and to
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in panels, and what keeps its memory alive."""

    packed: Tensor  # uint8
    bias: Tensor | None  # [n] float32, in the order of the packed columns
    n: int
    k: int
    dtype: torch.dtype
    group: int = 0  # input features of a scale, in 4 bits
    gather: Tensor | None = None  # [k] int32: column k is of input feature gather[k]; none: of k
    coding: Coding | None = None  # of codes that are decoded to `dtype` while they are multiplied

    @property
    def struct(self) -> abi.PgLinear:
        bias, gather = (None if one is None else one.data_ptr() for one in (self.bias, self.gather))
        form = WEIGHT_FORMATS[self.dtype] if self.coding is None else self.coding.format
        whole = abi.PgLinear(self.packed.data_ptr(), bias, self.n, self.k, form, self.group, gather)
        if self.coding is not None:
            whole.coding = self.coding.struct(self.dtype)
        return whole


class _Rows(NamedTuple):
    """Matrices for packing, and what keeps their memory alive."""

    rows: ctypes.Array[abi.PgRows]
    tensors: list[Tensor]
    dtype: torch.dtype


def codes_format(parts: Sequence[Codes]) -> torch.dtype:
    """The narrowest of NIBBLES that loses nothing, or int8.  Raises ValueError for what none of them holds."""
    if all(map(is_int8, parts)):
        return torch.int8
    for part in parts:
        if part.bits != 4 or part.table is not None or part.codes.dtype != torch.uint8:
            raise ValueError("the native kernels multiply codes of 4 bits without a table, and int8 by output feature")
    return INT4 if all(map(_is_narrow, parts)) else UINT4


def _is_narrow(codes: Codes) -> bool:
    if codes.zeros is None or bool((codes.zeros != ZERO).any()):
        return False
    return torch.equal(codes.scales.half().float(), codes.scales)


class Packing(CodedPacking):
    def packed_bytes(self, n: int, k: int, dtype: torch.dtype, group: int = 0) -> int:
        """Features lie together in twos in bfloat16, in fours in int8, in groups in 4 bits.

        Raises ValueError where these do not go up.
        """
        if k % TOGETHER[dtype]:
            raise ValueError(f"{k} input features cannot be packed in {dtype}")
        if dtype in NIBBLES and (group < TOGETHER[dtype] or group % TOGETHER[dtype]):
            raise ValueError(f"groups of {group} input features cannot be packed in {dtype}")
        return int(self._functions.pg_packed_bytes(n, k, WEIGHT_FORMATS[dtype], group))

    def pack_linear(
        self,
        weights: Tensor | Sequence[Tensor],  # [n, k], wherever it lies, or parts [..., k] of it one below the other
        dtype: torch.dtype,
        packed: Tensor,  # [packed_bytes] uint8, written
        bias: Tensor | None = None,  # [n] float32
        *,
        group: int = 0,  # input features of a scale, in 4 bits
        sums: Sums | None = None,  # [number of weights, WORDS] zeros; those of row_sums are added
    ) -> PackedLinear:
        parts = [weights] if isinstance(weights, Tensor) else list(weights)
        n, k = sum(map(len, parts)), parts[0].shape[1]
        check(packed, torch.uint8, (self.packed_bytes(n, k, dtype, group),))
        self._pack(self._rows(parts, sums), k, dtype, group, packed, by_turns=False)
        return PackedLinear(packed, bias, n, k, dtype, group)

    def pack_gate_up(
        self,
        gate: Tensor,  # [inner, k]
        up: Tensor,  # [inner, k], of the same dtype
        dtype: torch.dtype,
        packed: Tensor,  # [packed_bytes of 2 inner] uint8, written
        bias: Tensor | None = None,  # [2, inner] float32
        *,
        group: int = 0,
        sums: Sums | None = None,  # [2, WORDS] zeros, for gate and up; those of row_sums are added
    ) -> PackedLinear:
        """Columns of both by turns, as the fused activation reads them."""
        inner, k = gate.shape
        if up.shape != gate.shape or up.dtype != gate.dtype:
            raise ValueError(f"gate is {gate.dtype} {list(gate.shape)}, up {up.dtype} {list(up.shape)}")
        if inner % 16:  # else the last panel would not have a vector of each
            raise ValueError(f"{inner} rows of gate and up cannot be packed by turns")
        check(packed, torch.uint8, (self.packed_bytes(2 * inner, k, dtype, group),))
        self._pack(self._rows((gate, up), sums), k, dtype, group, packed, by_turns=True)
        return PackedLinear(packed, None if bias is None else self._by_turns(bias), 2 * inner, k, dtype, group)

    def _pack(self, read: _Rows, k: int, dtype: torch.dtype, group: int, packed: Tensor, *, by_turns: bool) -> None:
        if dtype == UINT4:
            raise ValueError("weights are quantised to int4, whose zeros are all 8; other codes are packed as they are")
        formats = FORMATS[read.dtype], k, WEIGHT_FORMATS[dtype], group
        self._call(self._functions.pg_pack_linear, read.rows, len(read.tensors), by_turns, *formats, packed.data_ptr())

    def pack_codes(
        self,
        parts: Codes | Sequence[Codes],  # [n, k] each, of the same groups
        packed: Tensor,  # [packed_bytes in codes_format] uint8, written
        bias: Tensor | None = None,  # [n] float32; [2, inner] by turns
        *,
        by_turns: bool = False,  # gate and up, as pack_gate_up has them; else one below the other
    ) -> PackedLinear:
        """A weight that is quantised already.  Raises ValueError where codes_format does, or parts cannot be joined."""
        parts = [parts] if isinstance(parts, Codes) else list(parts)
        dtype, first = codes_format(parts), parts[0]
        rows, _held = read_codes(parts, by_turns=by_turns)
        n, k, group = sum(part.shape[0] for part in parts), first.shape[1], first.group
        check(packed, torch.uint8, (self.packed_bytes(n, k, dtype, group),))
        arguments = len(parts), by_turns, k, WEIGHT_FORMATS[dtype], group, packed.data_ptr()
        self._call(self._functions.pg_pack_codes, rows, *arguments)
        own = self._by_turns(bias) if by_turns and bias is not None else bias
        gather = None if first.gather is None else first.gather.to(torch.int32)
        return PackedLinear(packed, own, n, k, dtype, 0 if dtype == torch.int8 else group, gather)

    def pack_coded(
        self,
        parts: Codes | Sequence[Codes],  # [n, k] each, of the same groups, in the order of the input features
        dtype: torch.dtype,  # float32 or bfloat16: what they are multiplied as
        packed: Tensor,  # [coded_bytes] uint8, written
        bias: Tensor | None = None,  # [n] float32; [2, inner] by turns
        *,
        by_turns: bool = False,  # as of pack_codes
    ) -> PackedLinear:
        """Multiplied as if pack_linear had what the codes stand for.  Raises ValueError as fill_coded does."""
        parts = [parts] if isinstance(parts, Codes) else list(parts)
        coding, (n, k) = coding_of(parts), (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.fill_coded(parts, coding, packed, by_turns=by_turns)
        own = self._by_turns(bias) if by_turns and bias is not None else bias
        return PackedLinear(packed, own, n, k, dtype, min(parts[0].group, k), coding=coding)

    def _rows(self, parts: Sequence[Tensor], sums: Sums | None) -> _Rows:
        """What packing reads; sums of a tensor that it cannot read as it is are made here."""
        dtypes, k = {part.dtype for part in parts}, parts[0].shape[1]
        dtype = dtypes.pop() if dtypes in ({torch.float32}, {torch.bfloat16}) else torch.float32
        tensors = [part.to(dtype).contiguous() for part in parts]
        rows = (abi.PgRows * len(parts))()
        for row, tensor in zip(rows, tensors, strict=True):
            check(tensor, dtype, (len(tensor), k))
            row.rows, row.n = tensor.data_ptr(), len(tensor)
        if sums is None:
            return _Rows(rows, tensors, dtype)
        address = address_of_sums(sums, len(parts))
        for index, (row, part) in enumerate(zip(rows, parts, strict=True)):
            if row.rows == part.data_ptr():
                row.sums = address + index * sums.strides[0]
            else:
                sums[index] += self.row_sums(rows_of(part))
        return _Rows(rows, tensors, dtype)

    def copy(
        self,
        source: Tensor,  # contiguous
        out: Tensor,  # of the same shape, contiguous
        sums: Sums | None = None,  # [1, WORDS] zeros; those of row_sums, of the source, are added
    ) -> Tensor:
        """What `out.copy_(source)` does; formats that pg_copy does not have are left to that."""
        if out.shape != source.shape:
            raise ValueError(f"a tensor of shape {tuple(source.shape)} does not fit one of {tuple(out.shape)}")
        if (source.dtype, out.dtype) not in COPIED or not source.is_contiguous() or not out.is_contiguous():
            if sums is not None:
                sums += self.row_sums(rows_of(source))
            return out.copy_(source)
        read = source.data_ptr(), FORMATS[source.dtype], *row_shape(source)
        address = None if sums is None else address_of_sums(sums)
        self._call(self._functions.pg_copy, *read, FORMATS[out.dtype], out.data_ptr(), address)
        return out

    def _by_turns(
        self,
        bias: Tensor,  # [2, inner] float32
    ) -> Tensor:  # [2 inner] in the order of the packed columns: that of a weight with one input feature
        inner = bias.shape[1]
        packed = torch.empty(self.packed_bytes(2 * inner, 1, torch.float32), dtype=torch.uint8)
        self.pack_gate_up(bias[0, :, None], bias[1, :, None], torch.float32, packed)
        return packed.view(torch.float32)[: 2 * inner]

    def row_sums(
        self,
        rows: NDArray[np.uint8],  # [n, num_bytes]
    ) -> Sums:
        """As `kernels.ops.digest` has them."""
        if rows.dtype != np.uint8 or not rows.flags.c_contiguous:
            raise ValueError("bytes to be digested must be contiguous")
        sums = np.zeros(digest.WORDS, np.uint64)
        self._call(self._functions.pg_digest, rows.ctypes.data, *rows.shape, sums.ctypes.data)
        return sums
