"""Triton's kernels of linear attention: against the references, and bit for bit in other chunks and batches."""

from __future__ import annotations

import pytest
import torch

from kernels.interface import AttentionShape
from kernels.ops.states.causal_conv import causal_conv
from kernels.ops.states.delta_rule import gated_delta_rule
from kernels.provider import has_triton, triton_kernels
from tests.kernels.state_cases import DeltaInputs, Heads, make_plan, normal

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.triton.launch import INTERPRETED

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no GPU, and triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
TRITON = triton_kernels(AttentionShape())
HEADS = {"shared keys": Heads(2, 6, 16, 48), "odd sizes": Heads(1, 2, 24, 40), "a key of each": Heads(3, 3, 32, 16)}
NEAR = {torch.float32: 2e-5, torch.bfloat16: 5e-2}


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, atol=NEAR[found.dtype], rtol=NEAR[found.dtype])


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("heads", HEADS)
def test_the_delta_rule(heads: str, dtype: torch.dtype) -> None:
    shape, counts = HEADS[heads], (9, 1, 4)
    given = DeltaInputs.random(shape, sum(counts), dtype=dtype).to(DEVICE)
    states = normal(6, shape.value_heads, shape.key_dim, shape.value_dim, seed=5).to(DEVICE)
    expected, plan = states.clone(), make_plan((4, 0, 2), counts, (0, 12, 3), str(DEVICE))
    found = TRITON.gated_delta_rule(*given.tensors, states, plan)
    assert_near(found, gated_delta_rule(*given.tensors, expected, plan))
    assert_near(states, expected)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_convolution(width: int, dtype: torch.dtype) -> None:
    counts, channels = (9, 1, 2), 150
    wide = normal(sum(counts), channels + 7, dtype=dtype).to(DEVICE)
    weight = normal(width, channels, seed=1, dtype=dtype).to(DEVICE)
    states = normal(6, width - 1, channels, seed=2, dtype=dtype).to(DEVICE)
    expected, plan = states.clone(), make_plan((4, 0, 2), counts, (0, 12, 3), str(DEVICE))
    found = TRITON.causal_conv(wide[:, :channels], weight, states, plan)
    assert_near(found, causal_conv(wide[:, :channels], weight, expected, plan))
    assert torch.equal(states, expected)


@pytest.mark.parametrize("cuts", [(1,) * 11, (5, 6), (10, 1)])
def test_no_bit_depends_on_chunks_or_neighbours(cuts: tuple[int, ...]) -> None:
    shape = HEADS["shared keys"]
    given = DeltaInputs.random(shape, 11).to(DEVICE)
    x, weight = normal(11, shape.channels).to(DEVICE), normal(4, shape.channels, seed=3).to(DEVICE)
    results = []
    for parts in ((11,), cuts):
        states = normal(5, shape.value_heads, shape.key_dim, shape.value_dim, seed=5).to(DEVICE)
        inputs, outs, mixed, done = normal(5, 3, shape.channels, seed=6).to(DEVICE), [], [], 0
        for index, count in enumerate(parts):
            beside = index % 3  # tokens of another sequence, before these
            both = DeltaInputs.random(shape, beside, seed=40).to(DEVICE).before(given.part(slice(done, done + count)))
            first = 0 if beside else 1
            plan = make_plan((2, 3)[first:], (beside, count)[first:], (0, done)[first:], str(DEVICE))
            outs.append(TRITON.gated_delta_rule(*both.tensors, states, plan)[beside:])
            rows = torch.cat((normal(beside, shape.channels, seed=41).to(DEVICE), x[done : done + count]))
            mixed.append(TRITON.causal_conv(rows, weight, inputs, plan)[beside:])
            done += count
        results.append((torch.cat(outs), torch.cat(mixed), states[3], inputs[3]))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
