"""A quantised weight in its neutral form: what it comes to, by hand and against a matrix."""

from __future__ import annotations

import pytest
import torch

from kernels.ops.linears.codes import Codes, quantise_to_codes


def test_zeros_and_scales_are_of_groups_and_the_last_may_be_short() -> None:
    codes = torch.tensor([[0, 15, 8]], dtype=torch.uint8)
    zeros = torch.tensor([[8, 7]], dtype=torch.uint8)
    weight = Codes(codes, torch.tensor([[0.5, 2.0]]), group=2, bits=4, zeros=zeros)
    assert weight.dequantised().tolist() == [[-4.0, 3.5, 2.0]]


def test_a_table_gives_the_values_of_codes() -> None:
    table = torch.arange(16).float() ** 2
    weight = Codes(torch.tensor([[3, 5]], dtype=torch.uint8), torch.tensor([[2.0]]), group=2, bits=4, table=table)
    assert weight.dequantised().tolist() == [[18.0, 50.0]]


def test_columns_go_back_to_their_input_features() -> None:
    gather = torch.tensor([2, 0, 1])
    weight = Codes(torch.tensor([[1, 2, 3]], dtype=torch.uint8), torch.ones(1, 1), group=3, bits=8, gather=gather)
    assert weight.dequantised().tolist() == [[2.0, 3.0, 1.0]]


def test_float8_is_its_own_value() -> None:
    held = torch.tensor([[448.0, -0.5]]).to(torch.float8_e4m3fn)
    assert Codes(held, torch.tensor([[2.0]]), group=2, bits=8).dequantised().tolist() == [[896.0, -1.0]]


@pytest.mark.parametrize("columns", [64, 96, 100])
def test_nearest_codes_are_within_half_a_step(columns: int) -> None:
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    weight[2, :32] = 0
    codes = quantise_to_codes(weight, 32)
    assert codes.shape == (5, columns) and codes.codes.max() <= 15
    steps = codes.scales.abs().repeat_interleave(32, 1)[:, :columns]
    # The value at the other end of the scale is one step too far for 4 bits.
    assert ((codes.dequantised() - weight).abs() <= steps * 1.0001).all()
    assert ((codes.dequantised() - weight).abs() <= steps / 2 * 1.0001).float().mean() > 0.9
