"""Products of 4-bit weights: against their reference bit for bit, and each row against itself in other company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu.binding.native import Native
from kernels.cpu.binding.packing import PackedLinear, codes_format
from kernels.ops.linears import linear_codes, linear_int8
from kernels.ops.linears.codes import INT4, UINT4, Codes, quantise_to_codes
from tests.kernels.cpu.natives import BUILDS, load_build

SHAPES = [(16, 16), (64, 361), (80, 48), (576, 96), (1536, 70)]  # (in, out)
GROUPS = [32, 128, 4096]  # the last: whole rows


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    library = load_build(request.param)
    library.set_threads(2, pin=False)
    yield library
    library.set_threads(1, pin=False)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def any_codes(n: int, k: int, group: int, seed: int = 0) -> Codes:
    """With zeros of any value, and scales that float16 cannot hold."""
    generator, groups = torch.Generator().manual_seed(seed), -(-k // group)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 256, (n, groups), generator=generator, dtype=torch.uint8)
    return Codes(codes, torch.randn(n, groups, generator=generator) / 3, group, 4, zeros)


def memory(native: Native, n: int, k: int, dtype: torch.dtype, group: int) -> Tensor:
    return torch.zeros(native.packed_bytes(n, k, dtype, group), dtype=torch.uint8)


def pack(native: Native, codes: Codes, bias: Tensor | None = None) -> PackedLinear:
    n, k = codes.shape
    return native.pack_codes(codes, memory(native, n, k, codes_format([codes]), codes.group), bias)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_both_formats_are_the_reference_bit_for_bit(
    native: Native, in_features: int, out_features: int, group: int
) -> None:
    x, bias = normal(60, in_features) * 3, normal(out_features, seed=2)
    x[3] = 0.0
    narrow = quantise_to_codes(normal(out_features, in_features, seed=1), group)
    for codes, dtype in ((narrow, INT4), (any_codes(out_features, in_features, group), UINT4)):
        wanted = linear_codes.linear(x, linear_codes.pack_codes(codes), bias)
        packed = pack(native, codes, bias)
        assert packed.dtype == dtype
        for rows in (0, 1, 2, 3, 5, 13, 60):
            assert torch.equal(native.linear(x[:rows], packed), wanted[:rows])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_rows_are_alone(native: Native, in_features: int, out_features: int, group: int) -> None:
    """Bit for bit, for every number of rows up to 40, at every place, and for every number of threads."""
    x, packed = normal(300, in_features), pack(native, any_codes(out_features, in_features, group))
    whole = native.linear(x, packed)
    for rows in (*range(1, 41), 100):
        for start in (0, 7, 300 - rows):
            part = native.linear(x[start : start + rows].contiguous(), packed)
            assert torch.equal(part, whole[start : start + rows])
    for threads in (1, 3, 2):
        native.set_threads(threads, pin=False)
        assert torch.equal(native.linear(x, packed), whole)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", GROUPS)
def test_weights_are_quantised_as_the_reference_does(native: Native, group: int, stored: torch.dtype) -> None:
    """Byte for byte, where a group is empty, tiny, huge, or has its largest size at both ends too."""
    weight = normal(96, 176)
    weight[0] = 0
    weight[1] *= 1e-7
    weight[2] *= 3e4
    weight[3, 5], weight[3, 7] = 9.0, -9.0
    weight[4, 5], weight[4, 7] = -9.0, 9.0
    weight = weight.to(stored)
    whole = memory(native, 96, 176, INT4, group)
    found = native.pack_linear([weight[:40], weight[40:]], INT4, whole, group=group)
    codes = quantise_to_codes(weight, group)
    assert torch.equal(found.packed, pack(native, codes).packed)
    assert torch.equal(codes.scales.half().float(), codes.scales)


@pytest.mark.parametrize("inner", [16, 80, 352])
def test_gate_and_up_by_turns(native: Native, inner: int) -> None:
    """The same columns as of the two apart, each once, with its own bias."""
    x, bias = normal(7, 64, seed=2), torch.arange(2.0 * inner).view(2, inner)
    gate, up = (any_codes(inner, 64, 32, seed) for seed in range(2))
    whole = memory(native, 2 * inner, 64, UINT4, 32)
    packed = native.pack_codes([gate, up], whole, bias, by_turns=True)
    order = native.linear(torch.zeros(1, 64), packed)[0].long()
    assert sorted(order.tolist()) == list(range(2 * inner))
    apart = torch.cat([native.linear(x, pack(native, one)) for one in (gate, up)], dim=1)
    assert torch.equal(native.linear(x, packed), apart[:, order] + order.float())
    weights = normal(inner, 64, seed=5), normal(inner, 64, seed=6)
    half = memory(native, 2 * inner, 64, INT4, 32)
    quantised = native.pack_gate_up(*weights, INT4, half, group=32)
    again = native.pack_codes([quantise_to_codes(one, 32) for one in weights], half.clone(), by_turns=True)
    assert torch.equal(native.linear(x, quantised), native.linear(x, again))


def test_parts_one_below_the_other(native: Native) -> None:
    """One wide part makes all wide, and loses nothing of the others."""
    x, parts = normal(7, 64), [quantise_to_codes(normal(40, 64, seed=1), 32), any_codes(23, 64, 32)]
    packed = native.pack_codes(parts, memory(native, 63, 64, UINT4, 32))
    apart = torch.cat([native.linear(x, pack(native, part)) for part in parts], dim=1)
    assert torch.equal(native.linear(x, packed), apart)


@pytest.mark.parametrize("group", GROUPS)
def test_input_features_in_another_order(native: Native, group: int) -> None:
    """As of activations that are in that order already."""
    x, codes = normal(40, 80), any_codes(48, 80, group)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(3))
    packed = pack(native, replace(codes, gather=order))
    for rows in (1, 13, 40):
        found = native.linear(x[:rows], packed)
        assert torch.equal(found, native.linear(x[:rows, order].contiguous(), pack(native, codes)))
        wanted = linear_codes.linear(x, linear_codes.pack_codes(replace(codes, gather=order)))
        assert torch.equal(found, wanted[:rows])


def test_octets_are_int8(native: Native) -> None:
    """With -128, which quantising at load never makes; one below the other, and by turns."""
    generator, x = torch.Generator().manual_seed(4), normal(60, 80)
    codes = torch.randint(0, 256, (64, 80), generator=generator, dtype=torch.uint8)
    zeros = torch.full((64, 1), 128, dtype=torch.uint8)
    octets = Codes(codes, torch.rand(64, 1, generator=generator), 80, 8, zeros)
    wanted = linear_int8.linear(x, linear_codes.pack_codes(octets))
    room = memory(native, 64, 80, torch.int8, 0)
    pieces = zip(*(tensor.chunk(2) for tensor in (octets.codes, octets.scales, zeros)), strict=True)
    halves = [replace(octets, codes=piece, scales=scales, zeros=zero) for piece, scales, zero in pieces]
    for packed in (native.pack_codes(octets, room), native.pack_codes(halves, room.clone())):
        assert packed.dtype == torch.int8
        for rows in (1, 5, 60):
            assert torch.equal(native.linear(x[:rows], packed), wanted[:rows])
    bias = torch.arange(64.0).view(2, 32)
    turned = native.pack_codes(halves, room.clone(), bias, by_turns=True)
    order = native.linear(torch.zeros(1, 80), turned)[0].long()
    assert torch.equal(native.linear(x, turned), wanted[:, order] + order.float())


def test_what_cannot_be_packed(native: Native) -> None:
    codes = any_codes(32, 64, 32)
    for other in (replace(codes, bits=8), replace(codes, table=torch.zeros(16))):
        with pytest.raises(ValueError, match="codes of 4 bits"):
            codes_format([other])
    room = memory(native, 64, 64, UINT4, 32)
    with pytest.raises(ValueError, match="same input features, groups and order"):
        native.pack_codes([codes, any_codes(32, 64, 64)], room)
    with pytest.raises(ValueError, match="same input features, groups and order"):
        native.pack_codes([codes, replace(codes, gather=torch.arange(64))], room)
    with pytest.raises(ValueError, match="a gate and an up"):
        native.pack_codes([codes, any_codes(16, 64, 32)], room, by_turns=True)
    with pytest.raises(ValueError, match="72 input features"):
        native.packed_bytes(32, 72, INT4, 32)
    with pytest.raises(ValueError, match="groups of 40"):
        native.packed_bytes(32, 80, INT4, 40)
    with pytest.raises(ValueError, match="quantised to int4"):
        native.pack_linear(normal(64, 64), UINT4, room, group=32)
