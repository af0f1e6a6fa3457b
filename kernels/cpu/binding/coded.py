"""Packing of quantised weights that the native kernels decode while they multiply (native/linears/coded.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.contents import check
from kernels.cpu.binding.linear_attention import LinearAttention
from kernels.ops.linears.codes import E2M1, MIDDLE, ZERO, Codes, same_order

DECODED = {torch.float32: 0, torch.bfloat16: 1}  # PgFormat
E4M3_CODES, E2M1_CODES, INTEGERS_4, INTEGERS_8 = 5, 7, 8, 9  # PgFormat
SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 10}  # PgFormat
WORDS = {E4M3_CODES: 4, E2M1_CODES: 8, INTEGERS_4: 8, INTEGERS_8: 4}  # features that lie together


@dataclass(frozen=True, slots=True)
class Coding:
    """How codes lie in memory; what they are decoded to does not show there."""

    format: int
    scales: torch.dtype = torch.float32  # the narrowest that holds all of them
    has_zeros: bool = False

    def struct(self, decoded: torch.dtype) -> abi.PgCoding:
        return abi.PgCoding(self.format, SCALES[self.scales], self.has_zeros, DECODED[decoded])


def coding_of(parts: Sequence[Codes]) -> Coding:
    """Of parts of one weight.  Raises ValueError for codes that are not decoded so, or not all of one kind."""
    formats = {_format_of(part) for part in parts}
    if len(formats) > 1:
        raise ValueError("parts of one weight must be codes of one kind")
    found = formats.pop()
    is_integer, middle = found in (INTEGERS_4, INTEGERS_8), ZERO if found == INTEGERS_4 else MIDDLE
    has_zeros = is_integer and any(part.zeros is None or bool((part.zeros != middle).any()) for part in parts)
    scales = next((dtype for dtype in (torch.bfloat16, torch.float16) if _hold(dtype, parts)), torch.float32)
    return Coding(found, scales, has_zeros)


def _format_of(codes: Codes) -> int:
    if codes.codes.dtype == torch.float8_e4m3fn:
        return E4M3_CODES
    if codes.table is None:
        return INTEGERS_4 if codes.bits == 4 else INTEGERS_8
    if codes.bits != 4 or not torch.equal(codes.table, E2M1):
        raise ValueError("only the table of E2M1 is decoded natively")
    return E2M1_CODES


def _hold(dtype: torch.dtype, parts: Sequence[Codes]) -> bool:
    return all(torch.equal(part.scales.to(dtype).float(), part.scales) for part in parts)


def read_codes(
    parts: Sequence[Codes], *, by_turns: bool, has_zeros: bool = True
) -> tuple[ctypes.Array[abi.PgCodes], list[Tensor]]:
    """Codes as C reads them, and what keeps their memory alive.  Raises ValueError where parts of a weight cannot be
    joined, one below the other or `by_turns`."""
    (first, *others), k, group = parts, parts[0].shape[1], parts[0].group
    if any((part.shape[1], part.group) != (k, group) for part in others) or not same_order(parts):
        raise ValueError("parts of one weight must have the same input features, groups and order")
    if by_turns and (len(parts) != 2 or first.shape[0] % 16 or any(part.shape != first.shape for part in others)):
        raise ValueError("only a gate and an up of as many rows, a multiple of 16, can be packed by turns")
    rows, groups = (abi.PgCodes * len(parts))(), -(-k // group)
    held: list[Tensor] = []
    for row, part in zip(rows, parts, strict=True):
        row.n, octets, scales = part.shape[0], part.codes.view(torch.uint8).contiguous(), part.scales.contiguous()
        check(octets, torch.uint8, part.shape)
        check(scales, torch.float32, (row.n, groups))
        row.codes, row.scales = octets.data_ptr(), scales.data_ptr()
        held += (octets, scales)
        if part.zeros is not None and has_zeros:
            zeros = part.zeros.contiguous()
            check(zeros, torch.uint8, (row.n, groups))
            row.zeros = zeros.data_ptr()
            held.append(zeros)
    return rows, held


class CodedPacking(LinearAttention):
    def coded_bytes(self, n: int, k: int, coding: Coding, group: int) -> int:
        """Raises ValueError where features do not go up in words."""
        word = WORDS[coding.format]
        if k % word or (group < k and group % word):
            raise ValueError(f"{k} input features in groups of {group} cannot be packed in words of {word}")
        return int(self._functions.pg_coded_bytes(n, k, min(group, k), coding.struct(torch.float32)))

    def fill_coded(
        self,
        parts: Sequence[Codes],  # [n, k] each, of the same groups, in the order of the input features
        coding: Coding,  # of all of them
        packed: Tensor,  # [coded_bytes] uint8, written
        *,
        by_turns: bool,
    ) -> None:
        """Raises ValueError where a code is no number, or parts cannot be joined."""
        rows, _held = read_codes(parts, by_turns=by_turns, has_zeros=coding.has_zeros)
        k, group = parts[0].shape[1], parts[0].group
        if parts[0].gather is not None:
            raise ValueError("codes whose input features are in another order are not decoded natively")
        check(packed, torch.uint8, (self.coded_bytes(sum(part.shape[0] for part in parts), k, coding, group),))
        arguments = len(parts), by_turns, k, min(group, k), coding.struct(torch.float32), packed.data_ptr()
        if self._answer(self._functions.pg_pack_coded, rows, *arguments):
            raise ValueError("some of the weights are not numbers")
