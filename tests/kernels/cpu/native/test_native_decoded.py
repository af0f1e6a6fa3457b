"""Weights that are decoded while they are multiplied: the bits of those that were decoded before, for all rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu.binding.coded import coding_of
from kernels.cpu.binding.native import Native
from kernels.cpu.binding.packing import PackedLinear
from kernels.ops.linears.codes import E2M1, MIDDLE, ZERO, Codes
from tests.kernels.cpu.natives import BUILDS, load_build

KINDS = ["e4m3", "e2m1", "4 bits", "4 bits with zeros", "8 bits", "8 bits with zeros"]
SHAPES = [(64, 96, 32), (80, 48, 16), (576, 361, 4096), (1536, 70, 128)]  # (in, out, group)
ROWS = (0, 1, 2, 4, 13, 60, 540)


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    library = load_build(request.param)
    library.set_threads(2, pin=False)
    yield library
    library.set_threads(1, pin=False)


def any_codes(kind: str, n: int, k: int, group: int, seed: int = 0) -> Codes:
    """With every code of FP8 that is a number, and scales of formats that differ."""
    generator, groups = torch.Generator().manual_seed(seed), -(-k // group)
    scales = torch.rand(n, groups, generator=generator) / 8 + 2**-9
    if kind == "e4m3":
        codes = torch.randint(0, 256, (n, k), generator=generator).to(torch.uint8)
        codes[(codes & 127) == 127] = 1  # the smallest that is not zero
        return Codes(codes.view(torch.float8_e4m3fn), scales, group, 8)
    bits = 8 if kind.startswith("8") else 4
    codes = torch.randint(0, 1 << bits, (n, k), generator=generator, dtype=torch.uint8)
    if kind == "e2m1":
        return Codes(codes, scales.bfloat16().float(), group, 4, table=E2M1)
    zeros = torch.full((n, groups), ZERO if bits == 4 else MIDDLE, dtype=torch.uint8)
    if kind.endswith("zeros"):
        zeros = torch.randint(0, 1 << bits, (n, groups), generator=generator, dtype=torch.uint8)
    return Codes(codes, scales.half().float(), group, bits, zeros)


def room(native: Native, parts: list[Codes]) -> Tensor:
    (_, k), n = parts[0].shape, sum(part.shape[0] for part in parts)
    return torch.zeros(native.coded_bytes(n, k, coding_of(parts), parts[0].group), dtype=torch.uint8)


def pack(native: Native, codes: Codes, dtype: torch.dtype, bias: Tensor | None = None) -> PackedLinear:
    return native.pack_coded(codes, dtype, room(native, [codes]), bias)


def decoded(native: Native, codes: Codes, dtype: torch.dtype, bias: Tensor | None = None) -> PackedLinear:
    memory = torch.zeros(native.packed_bytes(*codes.shape, dtype), dtype=torch.uint8)
    return native.pack_linear(codes.dequantised(), dtype, memory, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_weights_decoded_before(native: Native, kind: str, dtype: torch.dtype) -> None:
    for in_features, out_features, group in SHAPES:
        x = torch.randn(max(ROWS), in_features, generator=torch.Generator().manual_seed(1))
        bias, codes = torch.arange(float(out_features)), any_codes(kind, out_features, in_features, group)
        found, wanted = pack(native, codes, dtype, bias), decoded(native, codes, dtype, bias)
        assert found.packed.nbytes < 0.55 * wanted.packed.nbytes * (2 if codes.bits == 8 else 1.2), "memory of codes"
        for rows in ROWS:
            for rounds in (False, True):
                one, other = (native.linear(x[:rows], weight, rounds=rounds) for weight in (found, wanted))
                assert torch.equal(one, other), (in_features, rows, rounds)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_turns(native: Native, kind: str) -> None:
    """The same columns as of each apart, also where one part has zeros and the other has none."""
    x, bias = torch.randn(7, 64, generator=torch.Generator().manual_seed(2)), torch.arange(96.0).view(2, 48)
    parts = [any_codes(kind, 48, 64, 32, seed=1), any_codes(kind.removesuffix(" with zeros"), 48, 64, 32)]
    whole = room(native, parts)
    apart = torch.cat([native.linear(x, pack(native, part, torch.float32)) for part in parts], dim=1)
    assert torch.equal(native.linear(x, native.pack_coded(parts, torch.float32, whole)), apart)
    turned = native.pack_coded(parts, torch.float32, whole, bias, by_turns=True)
    order = native.linear(torch.zeros(1, 64), turned)[0].long()
    assert sorted(order.tolist()) == list(range(96))
    assert torch.equal(native.linear(x, turned), apart[:, order] + order.float())


def test_what_cannot_be_packed(native: Native) -> None:
    codes, wide = any_codes("4 bits", 32, 64, 32), any_codes("e4m3", 32, 64, 32)
    for parts, text in (
        ([codes, wide], "one kind"),
        ([replace(codes, table=torch.zeros(16))], "E2M1"),
        ([codes, any_codes("4 bits", 32, 64, 64)], "same input features, groups and order"),
        ([replace(codes, gather=torch.arange(64))], "another order"),
        ([any_codes("4 bits", 32, 64, 20)], "words of 8"),
    ):
        with pytest.raises(ValueError, match=text):
            native.pack_coded(parts, torch.float32, room(native, parts))
    no_number = wide.codes.clone()
    no_number.view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(ValueError, match="not numbers"):
        pack(native, replace(wide, codes=no_number), torch.float32)
