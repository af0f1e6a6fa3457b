"""Triton's mixtures of experts against the reference: on a GPU where there is one, else interpreted."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kernels.interface import AttentionShape, Kernels, reference_kernels
from kernels.ops.experts import experts as reference_experts
from kernels.ops.experts.experts import Routing
from kernels.provider import has_triton, triton_kernels
from tests.kernels.expert_cases import COUNT, ROUTINGS, SHAPES, Mixture, kinds, logits_with_ties, normal

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.triton import launch
from kernels.triton.experts import expert_slots, experts
from kernels.triton.linears.linear_int8 import Tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and not launch.INTERPRETED:
    pytest.skip("no GPU, and triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
REFERENCE, TRITON = reference_kernels(), triton_kernels(AttentionShape())
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("ties", [False, True])
def test_route(name: str, corrected: bool, ties: bool) -> None:
    """The same experts, and weights that differ by a last bit at most."""
    logits = (logits_with_ties(12) if ties else normal(12, COUNT) * 3).to(DEVICE)
    correction = ((normal(COUNT, seed=1) * 4).round() / 4).to(DEVICE) if corrected else None
    weights, ids = TRITON.route(logits, ROUTINGS[name], correction)
    wanted_weights, wanted_ids = REFERENCE.route(logits, ROUTINGS[name], correction)
    assert torch.equal(ids, wanted_ids)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, wanted_weights, atol=0, rtol=2e-7)


@pytest.mark.parametrize(
    "routing",
    [
        Routing("sigmoid", 8, renormalise=True, groups=8, kept_groups=4, scale=2.5),
        Routing("softmax", 8, renormalise=True),
        Routing("softmax", 6, renormalise=False, groups=8, kept_groups=3, group_best=1, scale=16.0),
        Routing("softmax_of_chosen", 4, renormalise=True),
    ],
)
@pytest.mark.parametrize("count", [128, 160, 256])
def test_route_among_many(routing: Routing, count: int) -> None:
    logits, correction = normal(9, count + 8)[:, 4:-4].to(DEVICE), normal(count, seed=2).to(DEVICE)
    found, wanted = (kernels.route(logits, routing, correction) for kernels in (TRITON, REFERENCE))
    assert torch.equal(found[1], wanted[1])
    torch.testing.assert_close(found[0], wanted[0], atol=0, rtol=2e-7)


def test_scores_that_are_all_zero() -> None:
    logits = torch.full((1, 6), -1e4, device=DEVICE)
    weights, ids = TRITON.route(logits, Routing("sigmoid", 2, renormalise=True), None)
    assert ids.tolist() == [[0, 1]]
    assert not weights.any()


@pytest.mark.parametrize("name", ROUTINGS)
def test_what_is_no_number_is_routed_to_experts_that_there_are(name: str) -> None:
    """Each to another, so that nothing is read beyond the weights."""
    logits = normal(3, COUNT).to(DEVICE)
    logits[1], logits[2, ::2] = float("nan"), float("nan")
    _, ids = TRITON.route(logits, ROUTINGS[name], None)
    assert bool((ids >= 0).all()) and bool((ids < COUNT).all())
    assert all(len(set(row)) == len(row) for row in ids.tolist())


def test_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="5 of 4 experts cannot be chosen"):
        TRITON.route(normal(1, 4), Routing("softmax", 5, renormalise=True), None)


@pytest.mark.parametrize(("num_tokens", "top_k", "count"), [(1, 1, 1), (1, 2, 40), (33, 4, 6), (700, 3, 5)])
def test_slots_are_sorted(num_tokens: int, top_k: int, count: int) -> None:
    ids = torch.randint(0, count, (num_tokens, top_k), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ids[ids == 2] = 0
    order, ends = expert_slots.sort_slots(ids, count)
    assert torch.equal(order.long(), ids.flatten().argsort(stable=True))
    assert torch.equal(ends.long(), torch.bincount(ids.flatten(), minlength=count).cumsum(0))


def test_there_is_room_for_every_tile() -> None:
    for rows in (1, 16, 128):
        for counts in ([0, 0, 0], [1, 0, 1], [rows] * 3, [rows + 1] * 3, [2 * rows + 1, 1, 1], [0, 0, 9 * rows]):
            room = expert_slots.most_tiles(sum(counts), len(counts), rows)
            assert sum(-(-count // rows) for count in counts) <= room <= sum(counts)


def compute(kernels: Kernels, mixture: Mixture, kind: str, dtype: torch.dtype, *, int8: bool = False) -> Tensor:
    def held(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(DEVICE, dtype)

    pack = kernels.pack_experts_int8 if int8 else kernels.pack_experts
    gate_up, down = (list(one.to(DEVICE, dtype)) for one in (mixture.gate_up, mixture.down))
    return kernels.experts(
        mixture.x.to(DEVICE, dtype),
        mixture.ids.to(DEVICE),
        mixture.weights.to(DEVICE),
        pack(gate_up, held(mixture.gate_up_bias)),
        pack(down, held(mixture.down_bias)),
        kind,
        mixture.gated,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts(shape: str, dtype: torch.dtype) -> None:
    mixture = SHAPES[shape]
    for kind in kinds(mixture) if dtype == torch.float32 else ("silu",):
        found, wanted = compute(TRITON, mixture, kind, dtype), compute(REFERENCE, mixture, kind, dtype)
        assert found.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found, wanted, atol=tolerance * float(wanted.abs().max()), rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_experts_against_float64(shape: str) -> None:
    found = compute(TRITON, SHAPES[shape], "silu", torch.float32)
    torch.testing.assert_close(found.double().cpu(), SHAPES[shape].wanted("silu"), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("tile", [Tile(16, 64, 32, 4, 2), Tile(64, 64, 64, 4, 2), Tile(128, 128, 32, 8, 2)])
def test_tiles_of_any_size(tile: Tile) -> None:
    with patch.object(experts, "choose_tile", lambda *_: tile):
        found = compute(TRITON, SHAPES["many rows"], "silu", torch.float32)
    torch.testing.assert_close(found.double().cpu(), SHAPES["many rows"].wanted("silu"), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_experts_in_int8(shape: str) -> None:
    """Sums of integers are exact; only an activation's last bit may move a number to the next integer."""
    mixture = SHAPES[shape]
    found = compute(TRITON, mixture, "silu", torch.float32, int8=True)
    wanted = compute(REFERENCE, mixture, "silu", torch.float32, int8=True)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-3
    exact = mixture.wanted("silu").to(DEVICE)
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.05


def test_a_row_is_alone() -> None:
    """As long as the tiles have one shape."""
    mixture = SHAPES["many rows"]
    tile = Tile(16, 64, 32, 4, 2)
    with patch.object(experts, "choose_tile", lambda *_: tile):
        whole = compute(TRITON, mixture, "silu", torch.float32)
        for row in (0, 41, 59):
            one = Mixture(1, count=5, top_k=3, hidden=72, inner=50, bias=True)
            one.x, one.ids, one.weights = (all_[row : row + 1] for all_ in (mixture.x, mixture.ids, mixture.weights))
            assert torch.equal(compute(TRITON, one, "silu", torch.float32)[0], whole[row])


def test_ranks_are_summed_in_their_order() -> None:
    ones = TRITON.pack_experts(list(torch.ones(3, 1, 1, device=DEVICE)), None)
    biases = torch.tensor([[1e8], [-1e8], [1.0]], device=DEVICE)
    values = TRITON.pack_experts(list(torch.zeros(3, 1, 1, device=DEVICE)), biases)
    orders = torch.tensor([[0, 1, 2], [2, 0, 1], [0, 2, 1]], device=DEVICE)
    x, weights = torch.ones(3, 1, device=DEVICE), torch.ones(3, 3, device=DEVICE)
    assert TRITON.experts(x, orders, weights, ones, values, "silu", False).tolist() == [[1.0], [0.0], [0.0]]


def test_nothing_is_read_from_the_device() -> None:
    """On tensors without contents, to read which is an error; launches are noted, and do nothing."""
    device, launched = torch.device("meta"), []

    class Launch:
        def __init__(self, kernel: Any) -> None:
            self._name = kernel.fn.__name__

        def __call__(self, *args: Any, **options: Any) -> None:
            launched.append(self._name)

    packed = [TRITON.pack_experts(list(torch.empty(4, *size, device=device)), None) for size in ((64, 16), (16, 32))]
    with patch.object(type(launch._probe), "__getitem__", lambda kernel, grid: Launch(kernel)):
        weights, ids = TRITON.route(torch.empty(9, 4, device=device), Routing("softmax", 2, renormalise=True), None)
        out = TRITON.experts(torch.empty(9, 16, device=device), ids, weights, packed[0], packed[1], "silu", True)
    assert out.shape == (9, 16)
    assert launched == [
        "choose_experts", "gather_slots", "multiply_slots", "activate_rows", "multiply_slots", "sum_ranks",
    ]  # fmt: skip
    with pytest.raises((RuntimeError, NotImplementedError)):
        unpacked = [reference_experts.pack_experts(list(torch.empty(4, *size)), None) for size in ((64, 16), (16, 32))]
        REFERENCE.experts(torch.empty(9, 16, device=device), ids, weights, unpacked[0], unpacked[1], "silu", True)
