"""Every kind of layer that the native kernels run, beside float64, and each token by itself, in every build."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.native import Native
from kernels.ops.linears.codes import INT4
from tests.kernels.cpu.native.native_models import MLP, NO_NORM, Decoder, Latent, Layer, Linear, Norm, normal
from tests.kernels.cpu.native.native_running import Running, rope
from tests.kernels.cpu.natives import BUILDS, load_build

VOCAB, HIDDEN, INNER, HEADS = 150, 80, 112, (6, 2, 32)
MAX_POSITIONS = 512
LENGTHS = (1, 37, 300, 5)
FORMATS = [
    (torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True), (torch.int8, False),
    (INT4, False),
]  # fmt: skip
Kind = Callable[[], Decoder]


@pytest.fixture(scope="module", params=BUILDS)
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    library = load_build(request.param)
    library.set_threads(2, pin=False)
    yield library
    library.set_threads(1, pin=False)


def decoder(layers: list[Layer], **changes: object) -> Decoder:
    head = Linear.random(VOCAB, HIDDEN, 90)
    given = {"embedding": normal(VOCAB, HIDDEN, seed=91), "norm": Norm.random(HIDDEN, 92)} | changes
    return Decoder(layers=layers, head=head, **given)  # type: ignore[arg-type]


def norms(seed: int, *names: str, kind: int = abi.RMS_NORM) -> dict[str, Norm]:
    return {name: Norm.random(HIDDEN, seed + 2 * place, kind) for place, name in enumerate(names)}


def llama() -> Decoder:
    mlp = MLP.random(HIDDEN, INNER, 1)
    rotation = rope(32, 1e4)
    return decoder([Layer.random(HIDDEN, HEADS, mlp, 9, rotation=rotation, **norms(20, "input_norm", "mlp_norm"))] * 2)


def gemma() -> Decoder:
    """Norms on both sides, two kinds of rotation and window, capped scores and logits, a large scale of embeddings."""
    every = ("input_norm", "attention_norm", "mlp_norm", "mlp_output_norm")
    layers = [
        Layer.random(
            HIDDEN,
            HEADS,
            MLP.random(HIDDEN, INNER, 30 * place, activation=abi.GELU_TANH),
            30 * place + 9,
            rotation=rope(32, base),
            window=window,
            softcap=1.5,
            scale=0.3,
            query_norm=Norm.random(32, 1),
            key_norm=Norm.random(32, 2),
            **norms(30 * place + 20, *every),
        )
        for place, (base, window) in enumerate(((100.0, 20), (1e5, 0)))
    ]
    return decoder(layers, embed_scale=math.sqrt(HIDDEN), logit_softcap=2.0, embedding=None)


def olmo2() -> Decoder:
    """Norms of what a layer adds alone, and of all heads together."""
    heads = {"query_norm": Norm.random(6 * 32, 5), "key_norm": Norm.random(2 * 32, 6), "norm_whole": True}
    mlp = MLP.random(HIDDEN, INNER, 1)
    given = heads | norms(20, "attention_norm", "mlp_output_norm")
    return decoder([Layer.random(HIDDEN, HEADS, mlp, 9, rotation=rope(32, 1e4), **given)] * 2)


def gpt2() -> Decoder:
    """Layer norms, learned positions, an MLP without a gate, a head dimension of 16."""
    mlp = MLP.random(HIDDEN, INNER, 1, gated=False, activation=abi.GELU_TANH, bias=True)
    given = norms(20, "input_norm", "mlp_norm", kind=abi.LAYER_NORM)
    positions = normal(MAX_POSITIONS, HIDDEN, seed=93)
    last = Norm.random(HIDDEN, 92, abi.LAYER_NORM)
    return decoder([Layer.random(HIDDEN, (4, 4, 16), mlp, 9, **given)] * 2, positions=positions, norm=last)


def gpt_oss() -> Decoder:
    mlp = MLP.random(HIDDEN, INNER, 1, activation=abi.CLAMPED_SWIGLU, bias=True)
    given = norms(20, "input_norm", "mlp_norm")
    sinks = torch.tensor([-30.0, -1.0, 0.0, 2.0, 6.0, 300.0])  # the last leaves nothing of the values
    layers = [
        Layer.random(HIDDEN, HEADS, mlp, 9, rotation=rope(32, 1e4), sinks=sinks, window=window, **given)
        for window in (7, 0)
    ]
    return decoder(layers)


def granite() -> Decoder:
    """Scales of everything; head dimensions that are no multiple of 32; a whole norm of queries alone."""
    mlp = MLP.random(HIDDEN, INNER, 1, gated=False)
    given = norms(20, "input_norm", "mlp_norm")
    layer = Layer.random(
        HIDDEN, (3, 1, 48), mlp, 9, rotation=rope(48, 1e4), scale=0.05,
        query_norm=Norm.random(3 * 48, 7, abi.LAYER_NORM), norm_whole=True, **given,
    )  # fmt: skip
    return decoder([layer] * 3, embed_scale=12.0, residual_scale=0.22, logit_scale=1 / 7)


def bare() -> Decoder:
    """No norms at all, not even the last; the greatest head dimension."""
    mlp = MLP.random(HIDDEN, INNER, 1)
    return decoder([Layer.random(HIDDEN, (2, 1, 256), mlp, 9, rotation=rope(256, 1e4))] * 2, norm=NO_NORM)


def mixed() -> Decoder:
    """Heads of another number and size in each layer; the widest come first, and in the middle."""
    shapes = [(6, 2, 64), (4, 4, 16), (8, 1, 80), (6, 3, 64), (3, 1, 32)]
    layers = [
        Layer.random(
            HIDDEN, heads, MLP.random(HIDDEN, INNER, 40 * place), 40 * place + 9, rotation=rope(heads[2], 1e4),
            window=20 * (place % 2), **norms(40 * place + 20, "input_norm", "mlp_norm"),
        )
        for place, heads in enumerate(shapes)
    ]  # fmt: skip
    return decoder(layers)


def latent() -> Decoder:
    """Latent attention: queries of a vector of their own and of the hidden state, heads in one part and in two."""
    small = Latent.random(6, 300, rank=48, rotated=16, plain=32, value_dim=16, query_rank=64)
    wide = Latent.random(20, 500, rank=80, rotated=32, plain=16, value_dim=48)
    given = norms(20, "input_norm", "mlp_norm")
    layers = [
        Layer.random_latent(
            HIDDEN, one, MLP.random(HIDDEN, INNER, seed), seed + 9, rotation=rope(one.rotated, 1e4), **given
        )
        for seed, one in ((40, small), (80, wide), (120, small))
    ]
    return decoder([layers[0], llama().layers[0], *layers[1:]])


def gemma4() -> Decoder:
    """Wider heads in the layer without a window, normed values, layers that are scaled."""
    every = ("input_norm", "attention_norm", "mlp_norm", "mlp_output_norm")
    layers = [
        Layer.random(
            HIDDEN, heads, MLP.random(HIDDEN, INNER, 30 * place, activation=abi.GELU_TANH), 30 * place + 9,
            rotation=rope(heads[2], 1e4), window=window, scale=0.3, layer_scale=torch.tensor([0.6 + place]),
            query_norm=Norm.random(heads[2], 1), key_norm=Norm.random(heads[2], 2), value_norm=Norm.random(heads[2], 3),
            **norms(30 * place + 20, *every),
        )
        for place, (heads, window) in enumerate((((6, 2, 32), 20), ((4, 1, 64), 0)))
    ]  # fmt: skip
    return decoder(layers)


KINDS: list[Kind] = [gemma4, latent, mixed, llama, gemma, olmo2, gpt2, gpt_oss, granite, bare]


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def whole(lengths: tuple[int, ...] = LENGTHS) -> dict[int, tuple[int, int]]:
    return {row: (0, length) for row, length in enumerate(lengths)}


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_logits(native: Native, kind: Kind) -> None:
    reference, given = kind(), sequences()
    running = Running(native, reference, given)
    for token_ids, found in zip(given, running.forward(whole()), strict=True):
        wanted = reference.hidden(token_ids)
        near = partial(torch.testing.assert_close, rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))
        near(found.double(), wanted)
        near(running.logits(found).double(), reference.logits(wanted))


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("kind", "most"), [(gemma, 0.02), (gpt_oss, 0.02), (latent, 0.04)])  # the last has more layers
def test_attention_over_rounded_keys(native: Native, kind: Kind, most: float, kv: torch.dtype) -> None:
    reference, given = kind(), sequences()
    found = torch.cat(Running(native, reference, given, kv=kv).forward(whole()))
    wanted = torch.cat([reference.hidden(token_ids) for token_ids in given])
    error = (found - wanted).square().mean().sqrt() / wanted.std()
    assert 0 < error < most


@pytest.mark.parametrize(("weights", "rounds"), FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_alone(native: Native, kind: Kind, weights: torch.dtype, rounds: bool) -> None:
    """Bit for bit: in one call or in chunks or token by token, beside others or not, for any number of threads."""
    given = sequences((40, 29, 3))
    running = Running(native, kind(), given, weights=weights, kv=torch.bfloat16, rounds=rounds)
    ends = [len(sequence) for sequence in given]
    together = running.forward(dict(enumerate(zip((0, 0, 0), ends, strict=True))))
    logits = [running.logits(hidden) for hidden in together]
    for threads in (1, 2, 3):
        native.set_threads(threads, pin=False)
        chunks = [{0: (0, 13)}, {1: (0, 28), 0: (13, 14)}, {0: (14, 40), 2: (0, 1), 1: (28, 29)}, {2: (1, 3)}]
        found: list[list[Tensor]] = [[], [], []]
        for chunk in chunks:
            for row, hidden in zip(chunk, running.forward(chunk), strict=True):
                found[row].append(hidden)
        for one, wanted, expected in zip(found, together, logits, strict=True):
            assert torch.equal(torch.cat(one), wanted)
            assert torch.equal(running.logits(torch.cat(one)), expected)
            assert torch.equal(running.greedy(wanted), expected.argmax(1))
    native.set_threads(2, pin=False)


@pytest.mark.parametrize("kind", [gemma, gpt2, granite, latent])
def test_extending_takes_the_greedy_tokens(native: Native, kind: Kind) -> None:
    given = sequences((9, 30))
    running = Running(native, kind(), given, room=12)
    found = running.extend({0: (0, 9), 1: (0, 30)}, 10)
    for column, sequence in zip(found.T, given, strict=True):
        longer = torch.cat((sequence, torch.from_numpy(column.astype(np.int64))))
        alone = Running(native, kind(), [longer])
        (hidden,) = alone.forward({0: (0, len(longer))})
        assert torch.equal(alone.greedy(hidden)[len(sequence) - 1 : -1], longer[len(sequence) :])


def plain_mlp(activation: int) -> MLP:
    """The activation itself."""
    identity = torch.eye(HIDDEN)
    return MLP(Linear(identity), Linear(identity), gated=False, activation=activation)


def gated_mlp(activation: int, up: float) -> MLP:
    """The activation times what becomes of `up`."""
    identity, zeros = torch.eye(HIDDEN), torch.zeros(HIDDEN)
    first = Linear(torch.cat((identity, 0 * identity)), torch.cat((zeros, zeros + up)))
    return MLP(first, Linear(identity), activation=activation)


ALONE = [plain_mlp(abi.SILU), plain_mlp(abi.GELU_TANH), gated_mlp(abi.SILU, 0.75), gated_mlp(abi.GELU_TANH, -3.0)]
ALONE += [gated_mlp(abi.CLAMPED_SWIGLU, up) for up in (-9.0, -1.0, 0.5, 6.9, 8.0)]


@pytest.mark.parametrize("mlp", ALONE, ids=lambda mlp: f"{mlp.activation}{'-gated' * mlp.gated}")
def test_activations(native: Native, mlp: MLP) -> None:
    """Of every size, the huge included: nothing overflows."""
    layer = Layer.random(HIDDEN, HEADS, mlp, 9)
    size = torch.logspace(-6, 3, 50 * HIDDEN).view(-1, HIDDEN)
    x = torch.cat((size, -size, torch.zeros(1, HIDDEN)))
    model = abi.PgModel(hidden=HIDDEN, residual_scale=1.0)
    found = native.feed_forward(model, layer.struct(native, torch.float32), x)
    torch.testing.assert_close(found.double(), mlp(x.double()), rtol=1e-6, atol=1e-6)
    tiny = x.abs() < 1e-3  # where an absolute error would hide what is wrong
    torch.testing.assert_close(found.double()[tiny], mlp(x.double())[tiny], rtol=1e-6, atol=1e-37)


def test_what_is_no_number_stays_none(native: Native) -> None:
    """So that a row that went wrong can be told by its logits."""
    x = torch.full((1, HIDDEN), float("nan"))
    for mlp in ALONE:
        layer = Layer.random(HIDDEN, HEADS, mlp, 9)
        model = abi.PgModel(hidden=HIDDEN)
        assert bool(native.feed_forward(model, layer.struct(native, torch.float32), x).isnan().all())
    capped = Running(native, gemma(), sequences((3,)))
    assert bool(capped.logits(x).isnan().all())


@pytest.mark.parametrize("limit", [0.5, 1.0, 30.0])
def test_capped_logits(native: Native, limit: float) -> None:
    head = Linear(torch.eye(HIDDEN))
    layer = Layer.random(HIDDEN, HEADS, MLP.random(HIDDEN, INNER, 1), 9)
    running = Running(native, Decoder(layers=[layer], head=head, logit_softcap=limit, logit_scale=2.0), sequences((3,)))
    size = torch.logspace(-6, 4, 100 * HIDDEN).view(-1, HIDDEN)
    x = torch.cat((size, -size, torch.zeros(1, HIDDEN)))
    wanted = limit * torch.tanh(2 * x.double() / limit)
    torch.testing.assert_close(running.logits(x).double(), wanted, rtol=5e-7, atol=1e-30)


def test_the_lowest_of_tokens_that_the_cap_makes_equal(native: Native) -> None:
    head = Linear(torch.eye(HIDDEN))
    layer = Layer.random(HIDDEN, HEADS, MLP.random(HIDDEN, INNER, 1), 9)
    running = Running(native, Decoder(layers=[layer], head=head, logit_softcap=1.0), sequences((3,)))
    x = normal(200, HIDDEN) * 20
    logits = running.logits(x)
    assert int((logits == 1.0).sum(1).min()) > 1
    for threads in (1, 2, 3, 2):
        native.set_threads(threads, pin=False)
        assert torch.equal(running.greedy(x), (logits == 1.0).int().argmax(1))


@pytest.mark.parametrize("hidden", [16, 80, 576])
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_layer_norm(native: Native, hidden: int, mean: float) -> None:
    x, norm = normal(9, hidden) + mean, Norm.random(hidden, 1, abi.LAYER_NORM)
    assert norm.weight is not None
    for bias in (None, norm.bias):
        wanted = Norm(norm.weight, bias, abi.LAYER_NORM)(x.double())
        found = native.layer_norm(x, norm.weight, bias, 1e-5)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 * (1 + mean / 10))
        assert torch.equal(native.layer_norm(x[4:6].contiguous(), norm.weight, bias, 1e-5), found[4:6])


def test_what_is_not_supported_is_said(native: Native) -> None:
    make = partial(abi.PgLayer, num_heads=4, num_kv_heads=2, head_dim=16)
    layers = {
        "intermediate_size": make(inner=72),
        "gate": make(inner=80, activation=abi.CLAMPED_SWIGLU),
        "": make(inner=80, gated=1, activation=abi.CLAMPED_SWIGLU),
    }
    for word, layer in layers.items():
        pointer = (abi.PgLayer * 2)(make(inner=16), layer)
        reason = native.why_unsupported(abi.PgModel(hidden=64, block_size=16, num_layers=2, layers=pointer))
        assert word in reason
        assert bool(reason) == bool(word)
