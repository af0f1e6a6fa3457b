"""What adapters add to a linear: native code against the reference, and a row by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.binding.lora import pack_lora
from kernels.ops.linears.lora import NO_ADAPTER, LoraPart, LoraWeights, lora, stack
from tests.kernels.cpu.native.native_models import normal
from tests.kernels.cpu.natives import BUILDS, load_build

K = 80
PARTS = (64, 32, 32)
GATED = (*PARTS, 64)  # gates behind the values
RANKS = ((16, 16, 16, 16), (5, 0, 3, 0), (1, 64, 8, 3))  # of each adapter, in each part
MAX_RANK = 64


def make_parts(adapter: int, dtype: torch.dtype, out_features: tuple[int, ...] = PARTS) -> list[LoraPart]:
    parts = []
    for index, (size, rank) in enumerate(zip(out_features, RANKS[adapter], strict=False)):
        seed = 100 * adapter + 10 * index
        down, up = (normal(*shape, seed=seed + 1).to(dtype) for shape in ((rank, K), (size, rank)))
        parts.append(LoraPart(size, down, up, 0.5 + adapter) if rank else LoraPart(size))
    return parts


def stacked(adapters: list[list[LoraPart]]) -> LoraWeights:
    weights = LoraWeights.empty([part.out_features for part in adapters[0]], K, len(adapters), MAX_RANK)
    for index, parts in enumerate(adapters):
        stack(weights, index, parts)
    return weights


def wanted(x: Tensor, y: Tensor, adapters: list[list[LoraPart]], rows: list[int]) -> Tensor:
    return lora(x, y.clone(), stacked(adapters), torch.tensor(rows))


def used_memory(size: int) -> Tensor:
    """As an adapter that was here before may have left it: what is not written are no numbers."""
    return torch.full((size,), 255, dtype=torch.uint8)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("round_rows", [False, True], ids=["floats", "rounded"])
@pytest.mark.parametrize("parts", [PARTS, GATED], ids=len)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_code_is_the_reference(dtype: torch.dtype, parts: tuple[int, ...], round_rows: bool, build: str) -> None:
    native = load_build(build)
    rows = [0, 0, 0, 0, 0, 1, NO_ADAPTER, 2, 2, 1]
    adapters = [make_parts(index, dtype, parts) for index in range(3)]
    x, y = normal(len(rows), K, seed=1), normal(len(rows), sum(parts), seed=2)
    structs = [pack_lora(own, native, dtype, used_memory) for own in adapters]
    given = [None if row < 0 else structs[row].struct for row in rows]
    found = native.lora(x, y.clone(), given, round_rows=round_rows)
    atol = 1e-4
    if round_rows and (native.fast_bfloat16 or build == "bf16-dot"):  # the latter emulates it on any processor
        x = x.bfloat16().float()
        if dtype == torch.bfloat16:  # A x is two numbers of bfloat16 then, which have 16 bits of it
            atol = float(2**-16 * (wanted(x, y, adapters, rows) - y).abs().max())
    torch.testing.assert_close(found, wanted(x, y, adapters, rows), rtol=1e-5, atol=atol)
    assert torch.equal(found[6], y[6])


def test_the_reference_gives_a_row_the_same_bits_in_any_batch() -> None:
    adapters = [make_parts(index, torch.float32) for index in range(3)]
    rows = [0, 1, 2, NO_ADAPTER, 1, 0, 0, 2]
    x, y = normal(len(rows), K, seed=1), normal(len(rows), sum(PARTS), seed=2)
    together = wanted(x, y, adapters, rows)
    for index, row in enumerate(rows):
        one = slice(index, index + 1)
        assert torch.equal(wanted(x[one], y[one], adapters, [row]), together[one])


def test_output_features_that_no_vector_divides_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        pack_lora([LoraPart(10, normal(2, K), normal(10, 2))], load_build("native"), torch.float32)


def test_more_projections_than_a_linear_joins_are_refused() -> None:
    parts = make_parts(0, torch.float32, GATED)
    with pytest.raises(ValueError, match="5 projections are joined, of which adapters change 4 at most"):
        pack_lora([*parts, parts[0]], load_build("native"), torch.float32)
