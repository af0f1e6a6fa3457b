"""The native kernels of linear attention: against the references, and bit for bit in other chunks and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.linear_attention import from_panels, to_panels
from kernels.cpu.binding.native import Native, StepColumns
from kernels.ops.states.causal_conv import causal_conv
from kernels.ops.states.delta_rule import delta_gates, gated_delta_rule
from tests.kernels.cpu.natives import load_build
from tests.kernels.state_cases import Heads, make_plan, normal

SLOTS = 6
HEADS = {
    "shared keys": Heads(2, 6, 16, 48),
    "a key of each": Heads(3, 3, 32, 16),
    "as in Qwen3-Next": Heads(2, 4, 128, 128),
}
Columns = tuple[Sequence[int], Sequence[int], Sequence[int]]  # slots, tokens, tokens before


@pytest.fixture(scope="module", params=["native", "avx2"])
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    library = load_build(request.param)
    library.set_threads(2, pin=False)
    yield library
    library.set_threads(1, pin=False)


@dataclass
class Layer:
    """Weights, and states that are left of earlier tokens."""

    heads: Heads
    width: int = 4

    def __post_init__(self) -> None:
        heads = self.heads
        self.taps = normal(self.width, heads.channels, seed=1)
        self.rate, self.bias = torch.logspace(-3, 1.2, heads.value_heads), normal(heads.value_heads, seed=2)
        self.inputs = normal(SLOTS, self.width - 1, heads.channels, seed=3)
        self.states = to_panels(normal(SLOTS, heads.value_heads, heads.key_dim, heads.value_dim, seed=4))

    @property
    def struct(self) -> abi.PgDelta:
        addresses = {name: getattr(self, name).data_ptr() for name in ("taps", "rate", "bias", "inputs", "states")}
        heads = self.heads
        dims = (heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim)
        return abi.PgDelta(*dims, self.width, **addresses)

    def reference(self, mixed: Tensor, gates: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
        """Results, and the states behind them."""
        heads, states = self.heads, from_panels(self.states).clone()
        keys = heads.key_heads * heads.key_dim
        query, key, value = mixed.tensor_split((keys, 2 * keys), dim=1)
        found = gated_delta_rule(
            query.view(-1, heads.key_heads, heads.key_dim),
            key.view(-1, heads.key_heads, heads.key_dim),
            value.view(-1, heads.value_heads, heads.value_dim),
            *delta_gates(gates, self.rate, self.bias),
            states,
            make_plan(*columns),
        )
        return found.flatten(1), states


def make_step(slots: Sequence[int], counts: Sequence[int], computed: Sequence[int]) -> tuple[StepColumns, abi.PgStep]:
    columns = StepColumns(torch.zeros(SLOTS, 4, dtype=torch.int64), np.zeros((SLOTS, 1), np.int64))
    given = (np.array(column) for column in (slots, computed, counts, counts))
    return columns, columns.fill(*given)


def tokens_of(heads: Heads, count: int, seed: int = 20) -> tuple[Tensor, Tensor]:
    return normal(count, heads.channels, seed=seed), 3 * normal(count, 2 * heads.value_heads, seed=seed + 1)


def run(native: Native, layer: Layer, mixed: Tensor, gates: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    _held, step = make_step(*columns)
    return native.causal_conv(layer.struct, step, mixed), native.delta_rule(layer.struct, step, mixed, gates)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_both_are_what_their_references_say(native: Native, heads: str, width: int) -> None:
    layer, columns = Layer(HEADS[heads], width), ((4, 0, 2), (53, 1, 2), (0, 12, 3))
    mixed, gates = tokens_of(layer.heads, 56)
    before = layer.states.clone(), layer.inputs.clone()
    wanted, states = layer.reference(mixed, gates, columns)
    inputs = layer.inputs.clone()
    convolved = causal_conv(mixed, layer.taps, inputs, make_plan(*columns))
    found = run(native, layer, mixed, gates, columns)
    assert_near(found[0], convolved)
    assert torch.equal(layer.inputs, inputs)
    assert_near(found[1], wanted)
    assert_near(from_panels(layer.states), states)
    for slot in (1, 3, 5):
        assert torch.equal(layer.states[slot], before[0][slot])
        assert torch.equal(layer.inputs[slot], before[1][slot])


def test_weak_and_strong_decays_keep_their_digits(native: Native) -> None:
    """A decay next to one is what a state forgets by over thousands of tokens."""
    layer = Layer(Heads(1, 4, 16, 16))
    layer.rate, layer.bias = torch.tensor([1e-4, 1.0, 1.0, 16.0]), torch.tensor([-8.0, -12.0, 3.0, 30.0])
    columns = ((0,), (3000,), (0,))
    mixed, gates = tokens_of(layer.heads, 3000)
    wanted, states = layer.reference(mixed, gates / 3, columns)
    found = run(native, layer, mixed, gates / 3, columns)[1]
    assert_near(found, wanted)
    assert_near(from_panels(layer.states)[0], states[0])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cuts", [(1,) * 37, (5, 16, 16), (36, 1), (2, 3, 32)])
@pytest.mark.parametrize("heads", HEADS)
def test_no_bit_depends_on_chunks_neighbours_or_threads(
    native: Native, heads: str, cuts: tuple[int, ...], threads: int
) -> None:
    shape = HEADS[heads]
    mixed, gates = tokens_of(shape, 37)
    whole = Layer(shape)
    native.set_threads(2, pin=False)
    wanted = run(native, whole, mixed, gates, ((3,), (37,), (0,)))
    native.set_threads(threads, pin=False)
    layer, done, found = Layer(shape), 0, []
    for index, count in enumerate(cuts):
        beside = index % 3  # tokens of another sequence, before these
        others = tokens_of(shape, beside, seed=60)
        rows, strengths = (
            torch.cat((other, one[done : done + count])) for other, one in zip(others, (mixed, gates), strict=True)
        )
        columns = ((2, 3), (beside, count), (0, done)) if beside else ((3,), (count,), (done,))
        results = run(native, layer, rows, strengths, columns)
        found.append([one[beside:] for one in results])
        done += count
    for parts, one in zip(zip(*found, strict=True), wanted, strict=True):
        assert torch.equal(torch.cat(parts), one)
    assert torch.equal(layer.states[3], whole.states[3])
    assert torch.equal(layer.inputs[3], whole.inputs[3])


def test_a_new_sequence_forgets_what_its_slot_held(native: Native) -> None:
    shape = HEADS["shared keys"]
    mixed, gates = tokens_of(shape, 2)
    layer, clean = Layer(shape), Layer(shape)
    clean.states.zero_()
    clean.inputs.zero_()
    columns = ((1, 0), (1, 1), (0, 0))
    for found, wanted in zip(*(run(native, one, mixed, gates, columns) for one in (layer, clean)), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(layer.states[:2], clean.states[:2])
    assert torch.equal(layer.inputs[:2], clean.inputs[:2])


def test_dimensions_that_are_not_served(native: Native) -> None:
    def why(*dims: int) -> str:
        delta = abi.PgDelta(*dims)
        layer = abi.PgLayer(inner=32)
        layer.delta.contents = delta
        model = abi.PgModel(num_layers=1, hidden=32, num_heads=2, num_kv_heads=2, head_dim=16, block_size=16)
        model.layers = (abi.PgLayer * 1)(layer)
        return native.why_unsupported(model)

    assert why(2, 4, 16, 32, 4) == ""
    for dims in ((2, 4, 24, 32, 4), (2, 4, 16, 40, 4), (2, 3, 16, 32, 4), (2, 4, 16, 32, 5), (2, 4, 16, 32, 1)):
        assert "linear attention" in why(*dims)
