"""Mixtures of experts on the CPU: routing and sums against plain Python in float64, and rows against themselves."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.interface import Kernels, reference_kernels
from kernels.ops.experts.experts import Routing, route
from kernels.ops.linears import linear_int8
from kernels.provider import select_kernels
from tests.kernels.expert_cases import (
    COUNT,
    ROUTINGS,
    SHAPES,
    Mixture,
    activated,
    kinds,
    logits_with_ties,
    normal,
    wanted_route,
)  # fmt: skip

CPU = torch.device("cpu")
PROVIDERS = {
    "reference": reference_kernels(),
    "cpu": select_kernels(CPU, torch.float32),
    "not invariant": select_kernels(CPU, torch.float32, batch_invariant=False),
}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("ties", [False, True])
def test_route(name: str, corrected: bool, ties: bool) -> None:
    routing = ROUTINGS[name]
    logits = logits_with_ties(30) if ties else normal(30, COUNT) * 3
    correction = (normal(COUNT, seed=1) * 4).round() / 4 if corrected else None
    weights, ids = route(logits, routing, correction)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    added = correction.tolist() if correction is not None else [0.0] * COUNT
    for row, one in enumerate(logits.tolist()):
        wanted_weights, wanted_ids = wanted_route(one, routing, added)
        assert ids[row].tolist() == wanted_ids
        assert weights[row].tolist() == pytest.approx(wanted_weights, rel=1e-6)


def test_equals_are_taken_by_id() -> None:
    for routing in ROUTINGS.values():
        _, ids = route(torch.zeros(2, COUNT), routing, None)
        assert ids.tolist() == [list(range(routing.top_k))] * 2


def test_the_correction_chooses_and_weighs_nothing() -> None:
    correction = torch.zeros(COUNT)
    correction[7] = 10.0
    logits = torch.linspace(2, -2, COUNT)[None]
    weights, ids = route(logits, ROUTINGS["sigmoid, as they are"], correction)
    assert ids.tolist() == [[7, 0, 1]]
    torch.testing.assert_close(weights, 2.5 * logits.sigmoid().gather(1, ids))


def test_logits_that_differ_are_not_made_equal_by_their_scores() -> None:
    """A softmax in float32 would make both zero."""
    logits = torch.full((1, 4), -1000.0)
    logits[0, 3], logits[0, 0] = -999.0, 500.0
    assert route(logits, Routing("softmax", 2, renormalise=True), None)[1].tolist() == [[0, 3]]


def test_scores_that_are_all_zero() -> None:
    weights, ids = route(torch.full((1, 6), -1e4), Routing("sigmoid", 2, renormalise=True), None)
    assert ids.tolist() == [[0, 1]]
    assert not weights.any()


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_route_is_alone(name: str) -> None:
    logits, correction = normal(50, COUNT), normal(COUNT, seed=1)
    whole = route(logits, ROUTINGS[name], correction)
    for start, end in ((0, 1), (7, 8), (13, 50)):
        for found, wanted in zip(route(logits[start:end], ROUTINGS[name], correction), whole, strict=True):
            assert torch.equal(found, wanted[start:end])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score": "tanh"}, "one of softmax, softmax_of_chosen, sigmoid"),
        ({"top_k": 0}, "at least 1"),
        ({"score": "sigmoid", "groups": 2, "kept_groups": 3}, "no more than groups"),
        ({"groups": 2}, "groups are for the best of a softmax, or for the two best of sigmoids"),
        ({"score": "sigmoid", "groups": 2, "group_best": 3}, "groups are for"),
        ({"score": "softmax_of_chosen", "groups": 2, "group_best": 1}, "groups are for"),
    ],
)
def test_a_routing_without_a_meaning(fields: dict[str, object], message: str) -> None:
    known: dict[str, object] = {"score": "softmax", "top_k": 2, "renormalise": True}
    with pytest.raises(ValueError, match=message):
        Routing(**(known | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "top_k", "groups", "kept"), [(4, 5, 1, 1), (12, 5, 4, 1), (10, 2, 4, 1)])
def test_more_than_there_are(count: int, top_k: int, groups: int, kept: int) -> None:
    routing = Routing("sigmoid", top_k, renormalise=True, groups=groups, kept_groups=kept)
    with pytest.raises(ValueError, match=f"{top_k} of {count} experts cannot be chosen"):
        route(normal(2, count), routing, None)


def compute(
    kernels: Kernels, mixture: Mixture, kind: str, rows: slice = slice(None), dtype: torch.dtype | None = None
) -> Tensor:
    """In what weights are held in, if not in float32."""

    def cast(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or dtype is None else tensor.to(dtype)

    x, gate_up, down = (cast(one) for one in (mixture.x, mixture.gate_up, mixture.down))
    assert x is not None and gate_up is not None and down is not None
    return kernels.experts(
        x[rows],
        mixture.ids[rows],
        mixture.weights[rows],
        kernels.pack_experts(list(gate_up), cast(mixture.gate_up_bias)),
        kernels.pack_experts(list(down), cast(mixture.down_bias)),
        kind,
        mixture.gated,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_experts(provider: str, shape: str) -> None:
    mixture = SHAPES[shape]
    for kind in kinds(mixture):
        found = compute(PROVIDERS[provider], mixture, kind)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), mixture.wanted(kind), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_experts_in_16_bits(dtype: torch.dtype, tolerance: float) -> None:
    for mixture in SHAPES.values():
        wanted = mixture.wanted("silu")
        found = compute(PROVIDERS["reference"], mixture, "silu", dtype=dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, atol=tolerance * float(wanted.abs().max()), rtol=tolerance)


def test_bfloat16_on_a_cpu_rounds_what_goes_into_the_linears() -> None:
    mixture = Mixture(9, count=4, top_k=2, hidden=64, inner=40)
    mixture.gate_up, mixture.down = (one.bfloat16().float() for one in (mixture.gate_up, mixture.down))
    found = compute(select_kernels(CPU, torch.bfloat16), mixture, "silu")
    wanted = torch.zeros_like(found)
    for row in range(9):
        for expert, weight in zip(mixture.ids[row].tolist(), mixture.weights[row], strict=True):
            inner = mixture.gate_up[expert] @ mixture.x[row].bfloat16().float()
            inner = activated(inner.double(), "silu", gated=True).float()
            wanted[row] += weight * (mixture.down[expert] @ inner.bfloat16().float())
    # A sum in another order may round the activation's bfloat16 to the other side.
    assert float((found - wanted).abs().mean()) < 1e-4


@pytest.mark.parametrize("quantised", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_experts_are_alone(dtype: torch.dtype, quantised: torch.dtype | None) -> None:
    kernels = select_kernels(CPU, dtype, quantised=quantised)
    mixture = Mixture(300, count=7, top_k=3, hidden=600, inner=90, bias=True)
    whole = compute(kernels, mixture, "silu")
    for start, end in ((0, 1), (7, 8), (3, 20), (100, 117), (1, 300)):
        assert torch.equal(compute(kernels, mixture, "silu", slice(start, end)), whole[start:end])


def test_ranks_are_summed_in_their_order() -> None:
    """In float32: a large number and its opposite, with a small one before, between, or behind them."""
    kernels = PROVIDERS["cpu"]
    ones = kernels.pack_experts(list(torch.ones(3, 1, 1)), None)
    values = kernels.pack_experts(list(torch.zeros(3, 1, 1)), torch.tensor([[1e8], [-1e8], [1.0]]))
    orders = torch.tensor([[0, 1, 2], [2, 0, 1], [0, 2, 1]])
    found = kernels.experts(torch.ones(3, 1), orders, torch.ones(3, 3), ones, values, "silu", False)
    assert found.tolist() == [[1.0], [0.0], [0.0]]


def test_experts_in_int8() -> None:
    """Each expert's linears as any other's in int8."""
    kernels = select_kernels(CPU, torch.float32, quantised=torch.int8)
    mixture = SHAPES["many rows"]
    found, wanted = compute(kernels, mixture, "silu"), torch.zeros_like(mixture.x)
    assert mixture.gate_up_bias is not None and mixture.down_bias is not None
    gate_up, down = ([linear_int8.pack_linear(one) for one in stacked] for stacked in (mixture.gate_up, mixture.down))
    for row in range(len(wanted)):
        for expert, weight in zip(mixture.ids[row].tolist(), mixture.weights[row], strict=True):
            inner = linear_int8.linear(mixture.x[row : row + 1], gate_up[expert], mixture.gate_up_bias[expert])
            inner = kernels.gated_activation(inner, "silu")
            wanted[row] += weight * linear_int8.linear(inner, down[expert], mixture.down_bias[expert])[0]
    assert torch.equal(found, wanted)
    exact = mixture.wanted("silu")
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.03


def test_every_expert_counts() -> None:
    """The weights of no two slots are mixed up: one expert's weights change the rows that it has, and no others."""
    mixture = Mixture(40, count=5, top_k=2, hidden=24, inner=16)
    before = compute(PROVIDERS["cpu"], mixture, "silu")
    mixture.down[3] *= 2
    changed = (compute(PROVIDERS["cpu"], mixture, "silu") != before).any(-1)
    assert torch.equal(changed, (mixture.ids == 3).any(-1))
    assert 0 < int(changed.sum()) < 40
    assert all(a != b for row in mixture.ids.tolist() for a, b in pairwise(row))
