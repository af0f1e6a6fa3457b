"""Every op of the CPU provider against its reference, over shapes and dtypes, and its rows against themselves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.interface import Kernels, reference_kernels
from kernels.ops.attention.attention import AttentionMetadata
from kernels.ops.attention.kv_cache import KVCache
from kernels.ops.layers import activation
from kernels.ops.linears.quantise import dequantise, quantise
from kernels.provider import select_kernels

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
REFERENCE = reference_kernels()
FLOAT32 = select_kernels(CPU, torch.float32)
BFLOAT16 = select_kernels(CPU, torch.bfloat16)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 33, 300])
@pytest.mark.parametrize(("in_features", "out_features"), [(24, 40), (72, 211), (513, 96), (1400, 64)])
def test_linear(dtype: torch.dtype, rows: int, in_features: int, out_features: int) -> None:
    kernels = select_kernels(CPU, dtype)
    x, weight = normal(rows, in_features, dtype=dtype), normal(out_features, in_features, dtype=dtype) / 30
    held = torch.float16 if dtype == torch.float16 else torch.float32
    for bias in (None, normal(out_features, dtype=dtype, seed=2)):
        found = kernels.linear(
            x.to(held), kernels.pack_linear(weight.to(held)), None if bias is None else bias.to(held)
        )
        assert found.dtype == held
        assert_near(found.to(dtype), REFERENCE.linear(x, REFERENCE.pack_linear(weight), bias))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_bfloat16_on_a_cpu_rounds_what_goes_in_and_nothing_else(batch_invariant: bool) -> None:
    kernels = select_kernels(CPU, torch.bfloat16, batch_invariant=batch_invariant)
    x, weight = normal(5, 300), normal(40, 300, dtype=torch.bfloat16, seed=1).float()
    wanted = x.bfloat16().double() @ weight.double().t()
    torch.testing.assert_close(kernels.linear(x, kernels.pack_linear(weight), None).double(), wanted, atol=1e-4, rtol=0)


def test_quantise() -> None:
    x = torch.tensor([[0.0, 0.0], [127.0, 0.5], [-254.0, 3.0], [1.0, -1.0]])
    quantised, scale = quantise(x)
    assert quantised.tolist() == [[0, 0], [127, 0], [-127, 2], [127, -127]], "ties go to even"
    assert scale.tolist() == [0.0, 1.0, 2.0, pytest.approx(1 / 127)]
    assert float((dequantise(quantised, scale) - x).abs().max()) <= 1.0


@pytest.mark.parametrize(("in_features", "out_features"), [(24, 40), (72, 211), (1400, 64)])
def test_linear_int8(in_features: int, out_features: int) -> None:
    """Exact integers between the two roundings, and near what it stands for."""
    kernels = select_kernels(CPU, torch.float32, quantised=torch.int8)
    x, weight, bias = normal(9, in_features), normal(out_features, in_features, seed=1), normal(out_features, seed=2)
    x[3] = 0.0
    packed = kernels.pack_linear(weight)
    found = kernels.linear(x, packed, bias)
    (q_x, scale_x), (q_w, scale_w) = quantise(x), quantise(weight)
    total = (q_x.long() @ q_w.long().t()).float()
    assert torch.equal(found, total * scale_w * scale_x[:, None] + bias)
    assert torch.equal(found[3], bias)
    assert torch.equal(kernels.linear(x[4:6], packed, bias), found[4:6])
    exact = x @ weight.t() + bias
    assert float((found - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize(("in_features", "out_features"), [(24, 40), (72, 211), (513, 96), (1400, 64), (64, 5000)])
def test_rows_of_a_linear_are_alone(in_features: int, out_features: int) -> None:
    x, weight = normal(300, in_features), FLOAT32.pack_linear(normal(out_features, in_features))
    bias = normal(out_features)
    whole = FLOAT32.linear(x, weight, bias)
    for start, end in ((0, 1), (7, 8), (3, 20), (100, 117), (250, 300), (1, 300)):
        assert torch.equal(FLOAT32.linear(x[start:end], weight, bias), whole[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 48), (33, 384), (7, 4, 22)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    kernels = select_kernels(CPU, dtype)
    x, residual = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)
    weight = normal(shape[-1], dtype=dtype, seed=2)
    assert_near(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    for found, wanted in zip(
        kernels.add_rms_norm(x, residual, weight, 1e-6), REFERENCE.add_rms_norm(x, residual, weight, 1e-6), strict=True
    ):
        assert_near(found, wanted)


def test_reference_rms_norm_is_torchs() -> None:
    x, weight = normal(9, 40), normal(40, seed=1)
    assert_near(REFERENCE.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (40,), weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (5, 48), (33, 384), (7, 4, 22)])
def test_layer_norm(dtype: torch.dtype, with_bias: bool, shape: tuple[int, ...]) -> None:
    """Beside torch's in float64."""
    x = normal(*shape, dtype=dtype) * 3 + 5
    weight, bias = normal(shape[-1], dtype=dtype, seed=2), normal(shape[-1], dtype=dtype, seed=3)
    added = bias if with_bias else None
    wide = bias.double() if with_bias else None
    wanted = torch.nn.functional.layer_norm(x.double(), shape[-1:], weight.double(), wide, 1e-5).to(dtype)
    for kernels in (REFERENCE, select_kernels(CPU, dtype)):
        assert_near(kernels.layer_norm(x, weight, added, 1e-5), wanted)


def test_layer_norm_of_equals_is_the_bias() -> None:
    weight, bias = normal(40), normal(40, seed=1)
    for kernels in (REFERENCE, FLOAT32):
        assert torch.equal(kernels.layer_norm(torch.full((2, 40), 3.0), weight, bias, 1e-5), bias.expand(2, -1))


def exact_activation(x: Tensor, kind: str) -> Tensor:
    """In float64."""
    if kind == "sigmoid":
        return x.double().sigmoid()
    if kind == "gelu_tanh":
        return torch.nn.functional.gelu(x.double(), approximate="tanh")
    return torch.nn.functional.silu(x.double())


def exact_gated(gate_up: Tensor, kind: str) -> Tensor:
    """In float64."""
    gate, up = gate_up.double().chunk(2, -1)
    if kind == "clamped_swiglu":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    return exact_activation(gate, kind) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", activation.GATED)
@pytest.mark.parametrize("shape", [(1, 64), (5, 48), (33, 142)])
def test_gated_activation(dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> None:
    gate_up = normal(*shape, dtype=dtype) * 4
    for kernels in (REFERENCE, select_kernels(CPU, dtype)):
        assert_near(kernels.gated_activation(gate_up, kind), exact_gated(gate_up, kind).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", activation.PLAIN)
@pytest.mark.parametrize("shape", [(1, 64), (33, 71), (3, 2, 40)])
def test_activation(dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape, dtype=dtype) * 4
    for kernels in (REFERENCE, select_kernels(CPU, dtype)):
        assert_near(kernels.activation(x, kind), exact_activation(x, kind).to(dtype))


def test_an_activation_without_a_meaning() -> None:
    for kernels in (REFERENCE, FLOAT32):
        with pytest.raises(KeyError):
            kernels.activation(normal(1, 8), "clamped_swiglu")
        with pytest.raises(KeyError):
            kernels.gated_activation(normal(1, 8), "relu")


def test_silu_s_bits_are_those_of_its_formula() -> None:
    """Models that were served before keep their bits."""
    gate_up = normal(9, 142) * 4
    gate, up = gate_up.chunk(2, -1)
    assert torch.equal(REFERENCE.gated_activation(gate_up, "silu"), torch.nn.functional.silu(gate) * up)
    wide = gate.double()
    assert torch.equal(FLOAT32.gated_activation(gate_up, "silu"), (wide / ((-wide).exp() + 1)).float() * up)


@pytest.mark.parametrize("kind", activation.PLAIN)
def test_activations_of_extremes(kind: str) -> None:
    x = torch.tensor([[-1e30, -1e4, -100.0, 0.0, 100.0, 1e4, 1e30]])
    for kernels in (REFERENCE, FLOAT32):
        wanted = (x > 0).float() + (x == 0) / 2 if kind == "sigmoid" else x.clamp(min=0)
        assert_near(kernels.activation(x, kind), wanted)


def test_a_clamped_swiglu_of_extremes() -> None:
    gate_up = torch.tensor([[-1e4, 100.0, 100.0, 100.0, 0.0, 1e4, -1e4, 0.0]])
    for kernels in (REFERENCE, FLOAT32):
        found = kernels.gated_activation(gate_up, "clamped_swiglu")
        most = 7 / (1 + math.exp(-1.702 * 7))
        assert_near(found, torch.tensor([[0.0, most * 8, most * -6, most]]))


def test_silu_of_extremes() -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert_near(FLOAT32.gated_activation(gate_up, "silu"), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]))


@pytest.mark.parametrize("width", [22, 71, 352])
def test_elementwise_rows_are_alone(width: int) -> None:
    x, weight = normal(77, 2 * width), normal(2 * width)
    works: list[Callable[[Tensor], Tensor]] = [
        lambda some: FLOAT32.rms_norm(some, weight, 1e-5),
        lambda some: FLOAT32.layer_norm(some, weight, weight, 1e-5),
        *(lambda some, kind=kind: FLOAT32.activation(some, kind) for kind in activation.PLAIN),
        *(lambda some, kind=kind: FLOAT32.gated_activation(some, kind) for kind in activation.GATED),
    ]
    for work in works:
        whole = work(x)
        for start, end in ((0, 1), (5, 9), (13, 77)):
            assert torch.equal(work(x[start:end]), whole[start:end])


@pytest.mark.parametrize("head_dim", [2, 22, 64])
def test_rotary(head_dim: int) -> None:
    """A rotation of each pair, as complex numbers say it."""
    x, angles = normal(5, 3, head_dim), normal(5, 1, head_dim // 2, seed=1)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    half = head_dim // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    assert_near(REFERENCE.rotary(x, cos, sin), torch.cat((turned.real, turned.imag), -1))


def test_store_kv() -> None:
    key, value = normal(5, 2, 8), normal(5, 2, 8, seed=1)
    cache = KVCache(torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8))
    FLOAT32.store_kv(key, value, cache, torch.tensor([11, 0, 6]))
    for held, tokens in zip(cache.tensors, (key, value), strict=True):
        flat = held.flatten(0, 1)
        assert torch.equal(flat[[11, 0, 6]], tokens[:3])
        assert int((flat != 0).any(-1).any(-1).sum()) == 3


def empty_cache(dtype: torch.dtype, *shape: int) -> KVCache:
    keys, values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    if dtype != torch.int8:
        return KVCache(keys, values)
    return KVCache(keys, values, torch.zeros(shape[:-1]), torch.zeros(shape[:-1]))


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2.0**-8), (torch.int8, 0.5 / 127)])
def test_store_kv_rounds_and_attention_reads_what_was_stored(dtype: torch.dtype, error: float) -> None:
    key, value = normal(12, 2, 8), normal(12, 2, 8, seed=1)
    cache, slots = empty_cache(dtype, 3, 4, 2, 8), torch.randperm(12, generator=torch.Generator().manual_seed(0))
    FLOAT32.store_kv(key, value, cache, slots)
    blocks = torch.arange(3)
    for read, tokens in ((cache.read_keys(blocks), key), (cache.read_values(blocks), value)):
        found = read.flatten(0, 1)[slots].float()
        largest = tokens.abs().amax(-1, keepdim=True)
        assert bool(((found - tokens).abs() <= largest * error * 1.001).all())
        assert not torch.equal(found, tokens)
    plan = FLOAT32.plan_attention([1], [9], torch.tensor([[2, 0, 1]]), 4, [0])
    wide = KVCache(cache.read_keys(blocks).float(), cache.read_values(blocks).float())
    query = normal(1, 4, 8, seed=2)
    found, wanted = (FLOAT32.paged_attention(query, one, plan, 0.3, 0) for one in (cache, wide))
    assert torch.equal(found, wanted)
    assert_near(found, REFERENCE.paged_attention(query, cache, plan, 0.3, 0))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("num_heads", "in_features", "out_features"), [(4, 32, 48), (3, 7, 5), (16, 128, 512)])
def test_head_linear(num_heads: int, in_features: int, out_features: int, rounded: bool) -> None:
    """Each head by its own weight; a row is alone."""
    x, weights = normal(21, num_heads, in_features), list(normal(num_heads, out_features, in_features, seed=1))
    if rounded:
        x, weights = x.bfloat16().float(), [weight.bfloat16().float() for weight in weights]
    kernels = BFLOAT16 if rounded else FLOAT32
    packed = kernels.pack_heads(weights)
    found = kernels.head_linear(x, packed)
    wanted = torch.stack([x[:, head].double() @ weight.double().t() for head, weight in enumerate(weights)], dim=1)
    assert_near(found, wanted.float())
    assert_near(REFERENCE.head_linear(x, REFERENCE.pack_heads(weights)), wanted.float())
    for rows in (slice(0, 1), slice(5, 9), slice(20, 21)):
        assert torch.equal(kernels.head_linear(x[rows], packed), found[rows])


@pytest.mark.parametrize("heads", [(4, 1, 48), (16, 1, 80)])
def test_latent_attention(heads: tuple[int, int, int]) -> None:
    paged = Paged([1, 3, 20], [70, 33, 20], heads, 16)
    cache = KVCache(paged.keys, paged.keys[..., :32], latent=True)
    found, wanted = (
        kernels.paged_attention(
            paged.query, cache, kernels.plan_attention(paged.query_lens, paged.seq_lens, paged.tables, 16, [0]), 0.3, 0
        )
        for kernels in (FLOAT32, REFERENCE)
    )
    assert found.shape == (27, heads[0], 32)
    assert_near(found, wanted)


class Paged:
    """A random cache and sequences in it; blocks that none holds are full of huge values, which must not be seen."""

    def __init__(
        self, query_lens: list[int], seq_lens: list[int], heads: tuple[int, int, int], block_size: int
    ) -> None:
        self.query_lens, self.seq_lens, self.block_size = query_lens, seq_lens, block_size
        num_heads, num_kv_heads, head_dim = heads
        counts = [-(-length // block_size) for length in seq_lens]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3))
        self.tables = torch.zeros(len(seq_lens), max(counts), dtype=torch.int64)
        for index, count in enumerate(counts):
            self.tables[index, :count] = order[sum(counts[:index]) : sum(counts[: index + 1])]
        shape = (len(order), block_size, num_kv_heads, head_dim)
        self.keys, self.values = normal(*shape, seed=1), normal(*shape, seed=2)
        self.keys[order[-2:]] = self.values[order[-2:]] = 1e6
        self.query = normal(sum(query_lens) + 3, num_heads, head_dim)

    def attend(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        window: int,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        plan: AttentionMetadata = kernels.plan_attention(
            self.query_lens, self.seq_lens, self.tables, self.block_size, [window]
        )
        cache = KVCache(self.keys.to(dtype), self.values.to(dtype))
        scale = self.query.shape[-1] ** -0.5
        return kernels.paged_attention(self.query.to(dtype), cache, plan, scale, window, softcap, sinks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("heads", [(4, 4, 8), (8, 2, 22), (6, 1, 64)])
def test_paged_attention(heads: tuple[int, int, int], block_size: int, window: int, dtype: torch.dtype) -> None:
    paged = Paged([1, 1, 4, 70, 1, 4, 20], [1, 65, 4, 150, 64, 33, 21], heads, block_size)
    found = paged.attend(select_kernels(CPU, dtype), dtype, window)
    assert_near(found, paged.attend(REFERENCE, dtype, window))
    assert not found[-3:].any()


def exact_attention(paged: Paged, window: int, softcap: float, sinks: Tensor | None) -> Tensor:
    """In float64, one query and head after the other, as the op is defined."""
    out = torch.zeros_like(paged.query)
    share, token = paged.query.shape[1] // paged.keys.shape[2], 0
    for index, (count, length) in enumerate(zip(paged.query_lens, paged.seq_lens, strict=True)):
        keys, values = (one[paged.tables[index]].flatten(0, 1).double() for one in (paged.keys, paged.values))
        for position in range(length - count, length):
            seen = slice(max(0, position - window + 1) if window else 0, position + 1)
            for head in range(paged.query.shape[1]):
                query = paged.query[token, head].double()
                scores = keys[seen, head // share] @ query * query.shape[0] ** -0.5
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                terms = scores.exp()
                total = terms.sum() + (sinks[head].double().exp() if sinks is not None else 0.0)
                out[token, head] = ((terms @ values[seen, head // share]) / total).float()
            token += 1
    return out


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 0.7, 30.0])
@pytest.mark.parametrize("window", [0, 5])
def test_softcaps_and_sinks(window: int, softcap: float, with_sinks: bool) -> None:
    paged = Paged([1, 4, 12, 1], [1, 33, 12, 64], (6, 2, 22), 16)
    sinks = normal(6, seed=5) * 3 if with_sinks else None
    wanted = exact_attention(paged, window, softcap, sinks)
    for kernels in (REFERENCE, FLOAT32, select_kernels(CPU, torch.float32, batch_invariant=False)):
        assert_near(paged.attend(kernels, torch.float32, window, softcap, sinks), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_of_any_size(dtype: torch.dtype) -> None:
    """A large one leaves nothing of the values, a small one all of them."""
    paged = Paged([1, 20], [40, 33], (4, 2, 16), 16)
    for kernels in (REFERENCE, select_kernels(CPU, dtype)):
        assert not paged.attend(kernels, dtype, 0, 0.0, torch.full((4,), 1e4)).any()
        found = paged.attend(kernels, dtype, 0, 0.0, torch.full((4,), -1e4))
        assert_near(found, paged.attend(kernels, dtype, 0))


def test_rows_with_softcap_and_sinks_are_alone() -> None:
    whole = Paged([1, 4, 1, 1], [65, 33, 150, 64], (6, 2, 22), 16)
    sinks, place = normal(6, seed=5), 0
    together = whole.attend(FLOAT32, torch.float32, 0, 20.0, sinks)
    for index, (count, length) in enumerate(zip(whole.query_lens, whole.seq_lens, strict=True)):
        cache = KVCache(whole.keys, whole.values)
        plan = FLOAT32.plan_attention([count], [length], whole.tables[index : index + 1], 16, [0])
        query = whole.query[place : place + count]
        alone = FLOAT32.paged_attention(query, cache, plan, 22**-0.5, 0, 20.0, sinks)
        assert torch.equal(alone, together[place : place + count])
        place += count


def test_long_prompts_are_cut() -> None:
    paged = Paged([600, 1], [700, 300], (4, 2, 16), 16)
    for window in (0, 100):
        found = paged.attend(FLOAT32, torch.float32, window)
        assert_near(found, paged.attend(REFERENCE, torch.float32, window))


def test_attention_in_float32_where_invariance_is_not_asked_for() -> None:
    paged = Paged([1, 4, 70], [65, 33, 150], (8, 2, 22), 16)
    fast = select_kernels(CPU, torch.float32, batch_invariant=False)
    assert fast.row_multiple == 1
    assert_near(paged.attend(fast, torch.float32, 0), paged.attend(REFERENCE, torch.float32, 0))


@pytest.mark.parametrize("window", [0, 3])
def test_reference_attention_is_torchs(window: int) -> None:
    paged = Paged([6], [9], (4, 2, 8), 8)
    keys, values = (cache[paged.tables[0]].flatten(0, 1)[:9].transpose(0, 1) for cache in (paged.keys, paged.values))
    distance = torch.arange(3, 9)[:, None] - torch.arange(9)
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    wanted = torch.nn.functional.scaled_dot_product_attention(
        paged.query[:6].transpose(0, 1), keys, values, attn_mask=seen, enable_gqa=True
    )
    assert_near(paged.attend(REFERENCE, torch.float32, window)[:6], wanted.transpose(0, 1))
