"""Triton's kernels of adapters: against the reference, and a row by itself."""

from __future__ import annotations

import pytest
import torch

from kernels.interface import AttentionShape
from kernels.ops.linears.lora import NO_ADAPTER, LoraWeights, lora
from kernels.provider import has_triton, triton_kernels
from tests.kernels.cpu.native.native_models import normal
from tests.kernels.cpu.native.test_lora import GATED, PARTS, K, make_parts, stacked

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.triton.launch import INTERPRETED

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no GPU, and triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
TRITON = triton_kernels(AttentionShape())
ROWS = [0, 0, 1, NO_ADAPTER, 2, 1, 0]


@pytest.mark.parametrize("parts", [GATED, PARTS, PARTS[:2], PARTS[:1]], ids=len)
def test_rows_are_the_reference_s_in_any_batch(parts: tuple[int, ...]) -> None:
    weights = stacked([make_parts(index, torch.float32, parts) for index in range(3)])
    down, up, scales = (one.to(DEVICE) for one in (weights.down, weights.up, weights.scales))
    weights = LoraWeights(down, up, scales, weights.parts)
    x, y = normal(len(ROWS), K, seed=1).to(DEVICE), normal(len(ROWS), sum(parts), seed=2).to(DEVICE)
    adapters = torch.tensor(ROWS, device=DEVICE)
    found = TRITON.lora(x, y.clone(), weights, adapters)
    torch.testing.assert_close(found, lora(x, y.clone(), weights, adapters), rtol=1e-4, atol=1e-3)
    assert torch.equal(found[3], y[3])
    for row in range(len(ROWS)):
        one = slice(row, row + 1)
        assert torch.equal(TRITON.lora(x[one], y[one].clone(), weights, adapters[one]), found[one])
