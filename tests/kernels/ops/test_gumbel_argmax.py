"""The pruned sampler gives the reference's token, every time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.gumbel_argmax import ERROR, approximate_noise
from kernels.interface import reference_kernels
from kernels.ops.sampling.noise import UNIT, row_keys
from kernels.provider import select_kernels

CPU_KERNELS = select_kernels(torch.device("cpu"), torch.float32).sampling
REFERENCE = reference_kernels().sampling


def normal(rows: int, vocab_size: int, scale: float) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale


def open_bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.new_full((len(values),), float("-inf")), torch.full((len(values),), values.shape[1])


@pytest.mark.parametrize("scale", [0.0, 0.1, 2.0, 5.0, 30.0, 1e6])
@pytest.mark.parametrize("vocab_size", [1, 2, 100, 600, 5000])
def test_gumbel_argmax(vocab_size: int, scale: float) -> None:
    values = normal(200, vocab_size, scale)
    keys = row_keys(torch.arange(200) - 100, torch.arange(200) * 7)
    bounds = open_bounds(values)
    found = CPU_KERNELS.gumbel_argmax(values, *bounds, keys)
    assert torch.equal(found, REFERENCE.gumbel_argmax(values, *bounds, keys))


@pytest.mark.parametrize("vocab_size", [20, 3000])
def test_truncated_in_the_middle_of_ties(vocab_size: int) -> None:
    values = normal(100, vocab_size, 1.0).round()
    keys = row_keys(torch.arange(100), torch.arange(100))
    cut, last_tied = values.quantile(0.5, dim=1).round(), torch.full((100,), vocab_size // 3)
    last_tied[::2] = vocab_size
    found = CPU_KERNELS.gumbel_argmax(values, cut, last_tied, keys)
    assert torch.equal(found, REFERENCE.gumbel_argmax(values, cut, last_tied, keys))
    chosen = values.gather(1, found[:, None])[:, 0]
    assert bool(((chosen > cut) | ((chosen == cut) & (found <= last_tied))).all())


def test_nothing_left() -> None:
    values = torch.full((2, 9), float("-inf"))
    values[1, 4] = 0.0
    keys = row_keys(torch.arange(2), torch.arange(2))
    for kernels in (CPU_KERNELS, REFERENCE):
        assert kernels.gumbel_argmax(values, *open_bounds(values), keys).tolist() == [0, 4]


def test_approximate_noise_everywhere() -> None:
    for start in range(0, 1 << 24, 1 << 21):
        uniform = torch.arange(start, start + (1 << 21))
        exact = -torch.log(-torch.log((uniform.double() + 0.5) * UNIT))
        found = approximate_noise((uniform << 8).to(torch.int32))
        assert float((found - exact).abs().max()) < ERROR
