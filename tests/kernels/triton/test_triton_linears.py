"""Linears of one row, and in E4M3 on both sides: Triton's kernels against their references, interpreted where there is
no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ops.linears import linear as plain
from kernels.ops.linears import linear_fp8 as reference
from kernels.ops.linears.codes import Codes
from kernels.provider import has_triton

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.triton import launch
from kernels.triton.linears import linear, linear_fp8, linear_row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and not launch.INTERPRETED:
    pytest.skip("no GPU, and triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
# The interpreter cuts float32 to bfloat16 where hardware rounds: an error of a whole last bit.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# Hopper's matrix units add products of E4M3 in fewer bits than float32 has: 2e-4 was seen.
OCTETS = {torch.float32: 1e-3 if DEVICE.type == "cuda" else 2e-5, torch.bfloat16: 2e-2}
WHOLE = 1 << 20


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(DEVICE, dtype)


def octets(n: int, k: int, group: int) -> Codes:
    scales = torch.rand(n, max(1, -(-k // group)), generator=torch.Generator().manual_seed(n)) + 0.1
    return Codes(normal(n, k).to(torch.float8_e4m3fn), scales.to(DEVICE), group, 8)


def differ(found: Tensor, wanted: Tensor) -> float:
    """As a part of the largest."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tile", [None, (4, 64), (2, 256), (2, 512)])
def test_one_row(tile: tuple[int, int] | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With features and columns that fill no tile, or fill it, or not even one."""
    n = 37 if tile else 16500  # more features than for which tiles are narrower
    if tile is not None:
        monkeypatch.setattr(linear_row, "choose_tile", lambda _: tile)
    x, weight, bias = (normal(*shape, dtype=dtype) for shape in ((1, 300), (n, 300), (n,)))
    for added in (None, bias):
        found = linear.linear(x, plain.pack_linear(weight), added)
        wanted = x.double() @ weight.double().t() + (0.0 if added is None else added.double())
        assert found.dtype == dtype and differ(found, wanted) <= TOLERANCE[dtype]


def test_more_rows_are_the_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = plain.pack_linear(normal(8, 16)), normal(2, 16)
    monkeypatch.setattr(linear, "linear_row", None)
    assert torch.equal(linear.linear(x, weight), plain.linear(x, weight))


@pytest.mark.parametrize("group", [128, 256, WHOLE])
def test_rows_become_e4m3(group: int) -> None:
    """Of each group by itself, the largest becomes the largest that E4M3 has; one of zeros stays zeros."""
    x = normal(5, 400) * torch.logspace(-6, 3, 5, device=DEVICE)[:, None]
    x[2, 128:256] = 0.0
    x[4] = 0.0
    found, scales = linear_fp8.quantise_groups(x, min(group, 400))
    wanted, wanted_scales = reference.quantise_groups(x, min(group, 400))
    assert torch.equal(found.float(), wanted.float()) and torch.equal(scales, wanted_scales)
    assert float(found.float().abs().max()) == 448.0


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [128, 256, WHOLE])
def test_products_in_e4m3(group: int, dtype: torch.dtype) -> None:
    packed = reference.pack_codes(octets(70, 400, group))
    bias = normal(70, dtype=dtype)
    for num_rows in (1, 20, 80):
        x = normal(num_rows, 400, dtype=dtype)
        for added in (None, bias):
            assert differ(linear_fp8.linear(x, packed, added), reference.linear(x, packed, added)) <= OCTETS[dtype]


def test_quantised_weights_are_near_what_they_were() -> None:
    weight, x = normal(48, 300), normal(9, 300)
    packed = reference.pack_linear(weight)
    assert packed.weight.dtype == reference.FP8 and packed.scales is not None and packed.scales.shape == (1, 48)
    assert differ(linear_fp8.linear(x, packed), x @ weight.t()) < 0.05


def test_what_is_not_e4m3() -> None:
    with pytest.raises(ValueError, match="E4M3"):
        reference.pack_codes(Codes(torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 1), 64, 4))
    with pytest.raises(ValueError, match="multiples of 128"):
        reference.pack_codes(octets(4, 128, 64).to(torch.device("cpu")))
