"""Linears of codes: the Triton kernel against its reference, on the GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ops.linears import linear_decoded as reference
from kernels.ops.linears.codes import E2M1, Codes
from kernels.ops.linears.decoded_weight import LONG
from kernels.provider import has_triton

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.triton import launch
from kernels.triton.linears import linear_decoded

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and not launch.INTERPRETED:
    pytest.skip("no GPU, and triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
KINDS = {"int4": 32, "e2m1": 16, "mxfp4": 32, "e4m3": 128}  # and their groups
# The interpreter cuts float32 to bfloat16 where hardware rounds: an error of a whole last bit.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def any_codes(kind: str, n: int, k: int, group: int, *, seed: int = 0) -> Codes:
    generator, groups = torch.Generator().manual_seed(n + seed), -(-k // group)
    scales = torch.rand(n, groups, generator=generator) + 0.1
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    if kind == "e4m3":
        numbers = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
        return Codes(numbers, scales, group, 8).to(DEVICE)
    if kind in ("e2m1", "mxfp4"):
        return Codes(codes, scales, group, 4, table=E2M1).to(DEVICE)
    zeros = torch.randint(0, 16, (n, groups), generator=generator, dtype=torch.uint8)
    return Codes(codes, scales, group, 4, zeros).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@pytest.mark.parametrize("group", [64, 128, 1024])
def test_long_slabs_of_integers_whose_blocks_are_whole(group: int) -> None:
    """Groups within a block, and one of several blocks."""
    codes, x = any_codes("int4", 48, 1024, group), normal(67, 1024, dtype=torch.bfloat16)
    packed = reference.pack_decoded(codes)
    assert packed.decoded is not None and packed.decoded.slab == LONG and packed.decoded.num_blocks > 1
    for other in (
        any_codes("int4", 48, 1024 + 64, 64),
        any_codes("mxfp4", 48, 1024, 64),
        any_codes("e4m3", 48, 1024, 64),
    ):
        short = reference.pack_decoded(other).decoded
        assert short is not None and short.slab < LONG
    found = linear_decoded.linear_decoded(x, packed)
    wanted = reference.linear_decoded(x, codes).float()
    assert float((found.float() - wanted).abs().max()) <= TOLERANCE[torch.bfloat16] * float(wanted.abs().max())
    for row in (0, 66):
        assert torch.equal(linear_decoded.linear_decoded(x[row : row + 1], packed)[0], found[row])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    """With features and columns that fill no tile; few rows in parts, and more rows than that."""
    for num_rows, k, n in ((1, 400, 70), (67, 272, 48), (130, 400, 70)):
        codes, x = any_codes(kind, n, k, KINDS[kind]), normal(num_rows, k, dtype=dtype)
        packed = reference.pack_decoded(codes)
        assert packed.decoded is not None and linear_decoded.num_parts(packed.decoded) > 1
        for bias in (None, normal(n, dtype=dtype)):
            found = linear_decoded.linear_decoded(x, packed, bias).float()
            wanted = reference.linear_decoded(x, codes, bias).float()
            assert float((found - wanted).abs().max()) <= TOLERANCE[dtype] * float(wanted.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_alone(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit, whether parts are added by a launch of their own or one after the other, in tiles of any rows; on a
    card also where numbers are made in memory first, whose products the interpreter adds in other pieces."""
    codes, x = any_codes(kind, 40, 512, KINDS[kind]), normal(140, 512, dtype=dtype)
    packed, bias = reference.pack_decoded(codes), normal(40, dtype=dtype)
    assert packed.decoded is not None and linear_decoded.num_parts(packed.decoded) > 1
    whole = linear_decoded.linear_decoded(x[: linear_decoded.MANY_ROWS], packed, bias)
    assert torch.equal(linear_decoded.linear_decoded(x[9:10], packed, bias)[0], whole[9])
    for num_rows in (16, 17, 40, 64, 70):
        assert torch.equal(linear_decoded.linear_decoded(x[:num_rows], packed, bias), whole[:num_rows])
    assert len(x) > linear_decoded.MANY_ROWS
    wide = linear_decoded.linear_decoded(x, packed, bias)[: len(whole)]
    if DEVICE.type == "cuda":
        assert torch.equal(wide, whole)
    off = float((wide.float() - whole.float()).abs().max())
    assert off <= TOLERANCE[dtype] * float(whole.float().abs().max())


def test_every_number_that_a_code_can_be() -> None:
    """Subnormal ones, zeros of both signs, and what is no number."""
    for kind, count in (("e2m1", 16), ("e4m3", 256)):
        octets = torch.arange(count, dtype=torch.uint8).repeat(128, 1)
        ones = torch.ones(128, -(-count // 128))
        if kind == "e2m1":
            codes = Codes(octets, ones, count, 4, table=E2M1).to(DEVICE)
        else:
            codes = Codes(octets.view(torch.float8_e4m3fn), ones, 128, 8).to(DEVICE)
        each = torch.eye(count, device=DEVICE)
        found = linear_decoded.linear_decoded(each, reference.pack_decoded(codes))[:, 0]
        numbers = codes.dequantised()[0]
        if kind == "e4m3":  # any product with what is no number is none, that with zero too
            assert bool(found.isnan().all()) and int(numbers.isnan().sum()) == 2
            octets[:, numbers.cpu().isnan()] = 0
            codes = Codes(octets.view(torch.float8_e4m3fn), ones, 128, 8).to(DEVICE)
            found = linear_decoded.linear_decoded(each, reference.pack_decoded(codes))[:, 0]
            numbers = codes.dequantised()[0]
        assert torch.equal(found, numbers)


def test_what_is_not_decoded() -> None:
    codes = any_codes("int4", 16, 64, 32)
    octets = Codes(codes.codes, codes.scales, 32, 8, codes.zeros)
    for other, text in ((octets, "4 bits"), (any_codes("int4", 16, 64, 8), "multiples of 16")):
        with pytest.raises(ValueError, match=text):
            reference.pack_decoded(other)
