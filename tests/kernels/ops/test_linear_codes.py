"""The reference of 4-bit weights and 8-bit activations: by hand, against what it stands for, and each row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ops.linears.codes import Codes, quantise_to_codes
from kernels.ops.linears.linear_codes import linear, pack_codes, pack_linear
from kernels.ops.linears.quantise import dequantise, quantise


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_two_groups_by_hand() -> None:
    """Inputs of 127 steps each, so that they are their own bytes; the second group has one feature."""
    codes = torch.tensor([[0, 15, 8], [3, 4, 1]], dtype=torch.uint8)
    zeros = torch.tensor([[8, 7], [200, 0]], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
    weight = pack_codes(Codes(codes, scales, group=2, bits=4, zeros=zeros))
    x = torch.tensor([[127.0, 1.0, 127.0], [0.0, 0.0, 254.0]])
    wanted = [[(-8 * 127 + 7) * 0.5 + 254.0, -197 * 127 - 196 + 4 * 127.0], [508.0, 1016.0]]
    assert linear(x, weight).tolist() == wanted
    assert linear(x, weight, torch.tensor([1.0, -1.0])).tolist() == [[a + 1, b - 1] for a, b in wanted]


@pytest.mark.parametrize("group", [32, 64, 128, 1 << 20])
@pytest.mark.parametrize("columns", [32, 80, 576])
def test_what_it_stands_for(columns: int, group: int) -> None:
    """The product of both sides dequantised, but for the rounding of float32."""
    x, codes = normal(9, columns), quantise_to_codes(normal(40, columns, seed=1), group)
    x[3] = 0
    pieces = [dequantise(*quantise(piece)) for piece in torch.split(x, group, 1)]
    wanted = torch.cat(pieces, 1).double() @ codes.dequantised().double().t()
    found = linear(x, pack_codes(codes))
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=1e-5)
    assert not found[3].any()
    assert torch.equal(linear(x[4:6], pack_codes(codes)), found[4:6])
    assert torch.equal(linear(x, pack_linear(normal(40, columns, seed=1), group)), found)


def test_groups_of_activations_are_nearer_than_whole_rows() -> None:
    """Where a few features are large, as they are in models."""
    x, weight = normal(50, 256), normal(64, 256, seed=1)
    x[:, 5] *= 30
    codes = quantise_to_codes(weight, 32)
    exact = x @ codes.dequantised().t()
    by_row = dequantise(*quantise(x)) @ codes.dequantised().t()
    found = linear(x, pack_codes(codes))
    assert float((found - exact).norm()) < 0.5 * float((by_row - exact).norm())


def test_codes_that_are_no_integers_are_refused() -> None:
    codes, ones = torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1, 1)
    for other in (
        Codes(codes, ones, 32, 4, table=torch.arange(16.0)),
        Codes(codes.to(torch.float8_e4m3fn), ones, 32, 8),
    ):
        with pytest.raises(ValueError, match="integers"):
            pack_codes(other)
