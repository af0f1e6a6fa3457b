"""A machine whose BLAS does not keep rows apart still gets rows that are alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cpu import linear as cpu_linear

Multiply = Callable[[Tensor, tuple[Tensor, ...], Tensor], None]


def spoiled_above(most_rows: int, honest: Multiply) -> Multiply:
    """A product that is off by a bit where more rows than `most_rows` come together, and by place within them."""

    def multiply(x: Tensor, chunks: tuple[Tensor, ...], out: Tensor) -> None:
        honest(x, chunks, out)
        if len(x) > most_rows:
            out *= 1 + torch.arange(len(x))[:, None] * 2e-7

    return multiply


@pytest.mark.parametrize(("most_rows", "tile"), [(256, 256), (100, 16), (16, 16), (1, 1)])
def test_tile_is_what_the_machine_bears(most_rows: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "_multiply", spoiled_above(most_rows, cpu_linear._multiply))
    weight = cpu_linear.LinearPacker().pack(torch.randn(20, 30))
    assert weight.tile == tile
    x = torch.randn(40, 30)
    whole = cpu_linear.linear(x, weight)
    torch.testing.assert_close(whole, x @ weight.weight.t())
    assert torch.equal(cpu_linear.linear(x[17:19], weight), whole[17:19])


@pytest.mark.parametrize("in_features", [48, 176, 1200])
def test_a_part_of_a_weight_gives_the_bits_of_the_whole(in_features: int) -> None:
    """Also a narrow one, which a BLAS sums otherwise."""
    assert cpu_linear.columns_are_alone(in_features, (1, 8, 3, 11, 12, 32, 40, 90, 7))


def test_parts_that_a_library_sums_otherwise_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = cpu_linear._multiply

    def spoiled(x: torch.Tensor, chunks: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        multiply(x, chunks, out)
        if out.shape[1] > 64:
            out *= 1 + 2**-20

    monkeypatch.setattr(cpu_linear, "_multiply", spoiled)
    assert cpu_linear.columns_are_alone(48, (20, 30))
    assert not cpu_linear.columns_are_alone(48, (40, 30))
