"""Mixtures of experts in the native kernels: the routing, the sum, and that a row knows nothing of its neighbours."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.native import Native
from kernels.ops.linears.codes import INT4
from tests.kernels.cpu.native.native_models import MLP, Decoder, Layer, Linear, Mixture, Norm, normal
from tests.kernels.cpu.native.native_running import Running, rope
from tests.kernels.cpu.natives import BUILDS, load_build

HIDDEN, INNER, SHARED, HEADS = 80, 48, 112, (4, 2, 16)
FORMATS = [
    (torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True), (torch.int8, False),
    (INT4, False),
]  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"count": 24, "top_k": 4},
    "renormalised": {"count": 37, "top_k": 8, "renormalise": True, "shared": True},
    "one of each": {"count": 8, "top_k": 1},
    "all": {"count": 6, "top_k": 6, "renormalise": True},
    "only one": {"count": 1, "top_k": 1, "shared": True},
    "of chosen": {
        "count": 32, "top_k": 4, "score": abi.SOFTMAX_OF_CHOSEN, "activation": abi.CLAMPED_SWIGLU, "bias": True,
    },
    "sigmoid": {"count": 24, "top_k": 5, "score": abi.SIGMOID, "renormalise": True, "scale": 2.5, "corrected": True},
    "groups": {
        "count": 32, "top_k": 6, "score": abi.SIGMOID, "groups": 8, "kept_groups": 3, "corrected": True, "scale": 1.5,
        "renormalise": True, "shared": True,
    },
    "groups by their best": {
        "count": 24, "top_k": 4, "groups": 6, "kept_groups": 2, "group_best": 1, "scale": 1.5, "shared": True,
    },
    "groups of one": {"count": 12, "top_k": 2, "score": abi.SIGMOID, "groups": 12, "kept_groups": 5},
    "gated shared": {"count": 60, "top_k": 4, "shared": True, "shared_gate": True},
    "plain": {"count": 10, "top_k": 3, "gated": False, "activation": abi.GELU_TANH, "shared": True, "bias": True},
    "no score is negative": {"count": 19, "top_k": 3, "score": abi.SIGMOID, "corrected": True},
}  # fmt: skip


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    library = load_build(request.param)
    library.set_threads(2, pin=False)
    yield library
    library.set_threads(1, pin=False)


def make_layer(kind: str, **changes: object) -> Layer:
    given = dict(KINDS[kind])
    mlp = {"gated": given.pop("gated", True), "activation": given.pop("activation", abi.SILU)}
    mlp["bias"] = given.pop("bias", False)
    count, corrected = given.pop("count"), given.pop("corrected", False)
    shared = MLP.random(HIDDEN, SHARED, 700, **mlp) if given.pop("shared", False) else None
    mixture = Mixture(
        router=Linear.random(count, HIDDEN, 800, bias=kind == "of chosen", scale=2),
        experts=[MLP.random(HIDDEN, INNER, 10 * place, **mlp) for place in range(count)],
        correction=normal(count, seed=900) / 3 if corrected else None,
        shared_gate=Linear.random(1, HIDDEN, 950) if given.pop("shared_gate", False) else None,
        **given,
    )
    return Layer.random(HIDDEN, HEADS, shared, 1, experts=mixture, **changes)


def make_model(*, rounds: bool = False) -> abi.PgModel:
    return abi.PgModel(hidden=HIDDEN, round_activations=rounds)


def mixture_of(layer: Layer) -> Mixture:
    assert layer.experts is not None
    return layer.experts


@pytest.mark.parametrize("kind", KINDS)
def test_routes(native: Native, kind: str) -> None:
    """Experts by rank, and their weights."""
    layer, x = make_layer(kind), normal(700, HIDDEN)
    ids, weights = native.route(make_model(), layer.struct(native, torch.float32), x)
    wanted, expected = mixture_of(layer).route(x.double())
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("score", [abi.SOFTMAX, abi.SOFTMAX_OF_CHOSEN, abi.SIGMOID])
def test_among_equals_the_lowest_comes_first(native: Native, score: int) -> None:
    layer = make_layer("softmax")
    ties = torch.tensor([0.0, 1, 3, 1, 3, 3, 0, 1] * 3)
    mixture = replace(mixture_of(layer), router=Linear(torch.zeros(24, HIDDEN), ties), score=score, top_k=12, held=[])
    layer = replace(layer, experts=mixture)
    ids, _ = native.route(make_model(), layer.struct(native, torch.float32), normal(5, HIDDEN))
    highest = [place for value in (3, 1) for place in range(24) if ties[place] == value]
    assert ids.tolist() == [highest[:12]] * 5


def test_a_correction_chooses_and_does_not_weigh(native: Native) -> None:
    layer, x = make_layer("sigmoid"), normal(9, HIDDEN)
    correction = torch.zeros(24)
    correction[17] = 100.0
    mixture = replace(mixture_of(layer), correction=correction, renormalise=False, scale=1.0, held=[])
    layer = replace(layer, experts=mixture)
    ids, weights = native.route(make_model(), layer.struct(native, torch.float32), x)
    assert (ids[:, 0] == 17).all()
    torch.testing.assert_close(weights[:, 0].double(), mixture.router(x.double())[:, 17].sigmoid(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rows", [1, 3, 40, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_experts(native: Native, kind: str, rows: int) -> None:
    layer, x = make_layer(kind), normal(rows, HIDDEN)
    found, wanted = (
        native.feed_forward(make_model(), layer.struct(native, torch.float32), x),
        layer.feed_forward(x.double()),
    )
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(("weights", "rounds"), [one for one in FORMATS if one != (torch.float32, False)])
@pytest.mark.parametrize("kind", ["softmax", "gated shared", "of chosen"])
def test_sums_in_other_formats(native: Native, kind: str, weights: torch.dtype, rounds: bool) -> None:
    """Most rows: in a few the rounding changes which experts are taken."""
    layer, x = make_layer(kind), normal(300, HIDDEN)
    found = native.feed_forward(make_model(rounds=rounds), layer.struct(native, weights), x)
    wanted = layer.feed_forward(x.double())
    errors = (found - wanted).square().mean(1).sqrt() / wanted.std()
    assert 0 < float(errors.median()) < {torch.int8: 0.03, INT4: 0.3}.get(weights, 0.02)


@pytest.mark.parametrize(("weights", "rounds"), FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_alone(native: Native, kind: str, weights: torch.dtype, rounds: bool) -> None:
    """Bit for bit: by itself, among 7 and among others that are routed elsewhere, at every place."""
    layer, x = make_layer(kind), normal(600, HIDDEN)
    model, struct = make_model(rounds=rounds), layer.struct(native, weights)
    whole = native.feed_forward(model, struct, x)
    for rows in (1, 2, 7, 40):
        for start in (0, 13, 505, 600 - rows):
            part = native.feed_forward(model, struct, x[start : start + rows].contiguous())
            assert torch.equal(part, whole[start : start + rows])
    order = torch.randperm(600, generator=torch.Generator().manual_seed(2))
    for threads in (1, 3, 2):
        native.set_threads(threads, pin=False)
        assert torch.equal(native.feed_forward(model, struct, x[order].contiguous()), whole[order])


@pytest.mark.parametrize("kind", ["gated shared", "of chosen"])
def test_a_row_is_alone_where_tiles_multiply(native: Native, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dimensions that tiles take: many rows are added up by columns, few rows and those of many threads are not."""
    for name, size in (("HIDDEN", 224), ("INNER", 64), ("SHARED", 96)):
        monkeypatch.setitem(globals(), name, size)
    layer, x = make_layer(kind), normal(600, HIDDEN)
    model, struct = make_model(rounds=True), layer.struct(native, torch.bfloat16)
    whole, wanted = native.feed_forward(model, struct, x), layer.feed_forward(x.double())
    errors = (whole - wanted).square().mean(1).sqrt() / wanted.std()
    assert 0 < float(errors.median()) < 0.02
    for start, rows in ((0, 1), (13, 40), (5, 300)):
        part = native.feed_forward(model, struct, x[start : start + rows].contiguous())
        assert torch.equal(part, whole[start : start + rows])
    for threads in (1, 5, 2):
        native.set_threads(threads, pin=False)
        assert torch.equal(native.feed_forward(model, struct, x), whole)


def test_first_linears_in_codes_before_second_ones_in_bfloat16(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a checkpoint that has codes for gate and up alone.  Where products of bfloat16 read what they give, one
    expert has more rows in a block than products of codes have room for."""
    for name, size in (("HIDDEN", 96), ("INNER", 64), ("SHARED", 64)):
        monkeypatch.setitem(globals(), name, size)
    layer, x = make_layer("only one"), normal(700, HIDDEN)
    model, struct = make_model(rounds=True), layer.struct(native, torch.bfloat16)
    first = [expert.first.pack(native, INT4, by_turns=True) for expert in mixture_of(layer).experts]
    table = (abi.PgLinear * len(first))(*(one.struct for one in first))
    struct.experts.contents.gate_up = table
    whole, wanted = native.feed_forward(model, struct, x), layer.feed_forward(x.double())
    errors = (whole - wanted).square().mean(1).sqrt() / wanted.std()
    assert 0.01 < float(errors.median()) < 0.3
    for start, rows in ((0, 100), (100, 289), (280, 288), (411, 289), (699, 1)):
        part = native.feed_forward(model, struct, x[start : start + rows].contiguous())
        assert torch.equal(part, whole[start : start + rows])


def test_experts_are_added_in_order_of_rank_and_the_shared_one_last(native: Native) -> None:
    """Told by the bits of sums whose terms are of very different sizes."""
    layer = make_layer("renormalised")
    mixture, struct, x = mixture_of(layer), layer.struct(native, torch.float32), normal(50, HIDDEN)
    ids, weights = native.route(make_model(), struct, x)
    alone = []
    for expert in (*mixture.experts, layer.mlp):
        dense = replace(layer, mlp=expert, experts=None, held=[])
        alone.append(native.feed_forward(make_model(), dense.struct(native, torch.float32), x))
    found = native.feed_forward(make_model(), struct, x)
    for order, same in ((range(9), True), ((8, *range(8)), False), (range(8, -1, -1), False)):
        total = torch.zeros_like(x)
        for rank in order:
            chosen = ids[:, rank] if rank < 8 else torch.full((50,), len(alone) - 1)
            term = torch.stack([alone[expert][row] for row, expert in enumerate(chosen.tolist())])
            weight = weights[:, rank] if rank < 8 else torch.ones(50)
            total = (total.double() + weight.double()[:, None] * term.double()).float()  # as a fused one rounds
        assert torch.equal(total, found) == same


@pytest.mark.parametrize("kind", ["softmax", "groups", "of chosen"])
def test_what_is_no_number_stays_in_its_row(native: Native, kind: str) -> None:
    layer, x = make_layer(kind), normal(40, HIDDEN)
    struct = layer.struct(native, torch.float32)
    wanted = native.feed_forward(make_model(), struct, x)
    x[11], x[12, 5], x[30] = float("nan"), float("inf"), float("nan")
    found = native.feed_forward(make_model(), struct, x)
    assert bool(found[[11, 30]].isnan().all())
    others = [row for row in range(40) if row not in (11, 12, 30)]
    assert torch.equal(found[others], wanted[others])


def make_decoder() -> Decoder:
    """A dense layer, and mixtures with norms around them."""
    before = {"input_norm": Norm.random(HIDDEN, 50), "mlp_norm": Norm.random(HIDDEN, 51)}
    mlp = MLP.random(HIDDEN, INNER, 1)
    layers = [
        make_layer("groups", mlp_output_norm=Norm.random(HIDDEN, 52), **before),
        Layer.random(HIDDEN, HEADS, mlp, 9, rotation=rope(16, 1e4), **before),
        make_layer("softmax", **before),
    ]
    head = Linear.random(150, HIDDEN, 90)
    return Decoder(layers=layers, head=head, norm=Norm.random(HIDDEN, 92), residual_scale=0.5)


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(0, 150, (length,), generator=generator) for length in (1, 37, 700)]


def test_a_decoder_with_experts(native: Native) -> None:
    decoder, given = make_decoder(), sequences()
    running = Running(native, decoder, given)
    for token_ids, found in zip(given, running.forward({0: (0, 1), 1: (0, 37), 2: (0, 700)}), strict=True):
        wanted = decoder.hidden(token_ids)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(("weights", "rounds"), FORMATS)
def test_a_token_of_a_decoder_with_experts_is_alone(native: Native, weights: torch.dtype, rounds: bool) -> None:
    running = Running(native, make_decoder(), sequences(), weights=weights, kv=torch.bfloat16, rounds=rounds)
    together = running.forward({0: (0, 1), 1: (0, 37), 2: (0, 700)})
    chunks = [{1: (0, 30), 2: (0, 513)}, {1: (30, 31)}, {2: (513, 514), 0: (0, 1), 1: (31, 37)}, {2: (514, 700)}]
    found: list[list[Tensor]] = [[], [], []]
    for chunk in chunks:
        for row, hidden in zip(chunk, running.forward(chunk), strict=True):
            found[row].append(hidden)
    for one, wanted in zip(found, together, strict=True):
        assert torch.equal(torch.cat(one), wanted)


UNSUPPORTED = {
    "multiple of 16": {"inner": 72},
    "takes more": {"top_k": 65, "count": 128},
    "more than there are": {"top_k": 33},
    "groups": {"groups": 5},
    "groups that hold": {"groups": 8, "top_k": 9, "kept_groups": 2},
    "up to 64 groups": {"groups": 128, "count": 128},
}  # fmt: skip


@pytest.mark.parametrize("word", ["", *UNSUPPORTED])
def test_what_is_not_supported_is_said(native: Native, word: str) -> None:
    served = {"count": 32, "top_k": 4, "inner": 48, "groups": 1, "kept_groups": 1}
    experts = abi.PgExperts(**(served | UNSUPPORTED.get(word, {})))
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    layers = (abi.PgLayer * 1)(abi.PgLayer(experts=ctypes.pointer(experts), **heads))
    reason = native.why_unsupported(abi.PgModel(hidden=64, block_size=16, num_layers=1, layers=layers))
    assert bool(reason) == bool(word)
