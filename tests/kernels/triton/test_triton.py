"""Every Triton kernel against its reference: on the GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.interface import AttentionShape, reference_kernels
from kernels.ops.attention import attention, rotary_store
from kernels.ops.attention.kv_cache import FP8, KVCache
from kernels.ops.attention.rotary_store import HeadNorm
from kernels.ops.layers import activation
from kernels.ops.linears import linear_int8
from kernels.ops.sampling import bad_words, draft_verification, penalties, rejection, truncation
from kernels.ops.sampling.noise import gumbel_noise, row_keys, token_bits
from kernels.ops.steps import row_writes, step_inputs  # fmt: skip
from kernels.provider import has_triton, triton_kernels

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
import triton.language as tl

from kernels.triton import launch
from kernels.triton.launch import PROGRAMS
from kernels.triton.sampling import bad_words as triton_bad_words
from kernels.triton.sampling import draft_verification as triton_verification
from kernels.triton.sampling import noise
from kernels.triton.sampling import penalties as triton_penalties
from kernels.triton.sampling import rejection as triton_rejection
from kernels.triton.sampling import truncation as triton_truncation
from kernels.triton.steps import row_writes as triton_row_writes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and not launch.INTERPRETED:
    pytest.skip("no GPU, and triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
REFERENCE, TRITON = reference_kernels(), triton_kernels(AttentionShape())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter cuts float32 to bfloat16 where hardware rounds: an error of a whole last bit.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}
NOTHING = float("-inf")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def integers(*values: int | Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_near(found: Tensor, wanted: Tensor, factor: float = 1.0) -> None:
    assert found.dtype == wanted.dtype
    tolerance = TOLERANCE.get(found.dtype, 1e-9) * factor
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def test_every_kernel_of_the_provider_is_triton_s() -> None:
    """But layers of plain weights, which are left to the vendor's library."""
    others = {
        field.name
        for field in fields(TRITON)
        if field.name not in ("name", "row_multiple", "sampling", "attention_sinks")
        and getattr(TRITON, field.name) is getattr(REFERENCE, field.name)
    }
    assert others == {"pack_linear", "pack_output", "exact_linear", "pack_exact", "head_linear", "pack_heads"}


# ---- rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 48), (3, 576), (2, 4, 22)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)
    weight = normal(shape[-1], dtype=dtype, seed=2)
    assert_near(TRITON.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    for found, wanted in zip(
        TRITON.add_rms_norm(x, residual, weight, 1e-6), REFERENCE.add_rms_norm(x, residual, weight, 1e-6), strict=True
    ):
        assert_near(found, wanted)


def test_rms_norm_of_a_slice() -> None:
    x, weight = normal(4, 6, 16), normal(16, seed=1)
    assert_near(TRITON.rms_norm(x[:, 2:5], weight, 1e-5), REFERENCE.rms_norm(x[:, 2:5], weight, 1e-5))
    wide, residual = normal(4, 40), normal(4, 40, seed=2)
    found = TRITON.add_rms_norm(wide[:, :16], residual[:, 8:24], weight, 1e-5)
    for one, wanted in zip(found, REFERENCE.add_rms_norm(wide[:, :16], residual[:, 8:24], weight, 1e-5), strict=True):
        assert_near(one, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 48), (3, 576), (2, 4, 22)])
def test_layer_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape, dtype=dtype) * 3 + 5, normal(shape[-1], dtype=dtype, seed=2)
    for bias in (None, normal(shape[-1], dtype=dtype, seed=3)):
        assert_near(TRITON.layer_norm(x, weight, bias, 1e-5), REFERENCE.layer_norm(x, weight, bias, 1e-5), 2.0)
    assert_near(
        TRITON.layer_norm(x[..., :16], weight[:16], None, 1.0),
        REFERENCE.layer_norm(x[..., :16], weight[:16], None, 1.0),
    )


@pytest.mark.parametrize("kind", activation.GATED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 142), (2, 4400)])
def test_gated_activation(dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> None:
    gate_up = normal(*shape, dtype=dtype) * 4
    assert_near(TRITON.gated_activation(gate_up, kind), REFERENCE.gated_activation(gate_up, kind), 4.0)


@pytest.mark.parametrize("kind", activation.PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 71), (2, 2, 2200)])
def test_activation(dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape, dtype=dtype) * 4
    assert_near(TRITON.activation(x, kind), REFERENCE.activation(x, kind), 4.0)
    assert_near(TRITON.activation(x[..., 7:40], kind), REFERENCE.activation(x[..., 7:40], kind), 4.0)


@pytest.mark.parametrize("kind", activation.PLAIN)
def test_activations_of_extremes(kind: str) -> None:
    x = torch.tensor([[-1e30, -1e4, -100.0, 0.0, 100.0, 1e4, 1e30]], device=DEVICE)
    wanted = (x > 0).float() + (x == 0) / 2 if kind == "sigmoid" else x.clamp(min=0)
    assert_near(TRITON.activation(x, kind), wanted)


def test_an_activation_without_a_meaning() -> None:
    with pytest.raises(KeyError):
        TRITON.activation(normal(1, 8), "clamped_swiglu")
    with pytest.raises(KeyError):
        TRITON.gated_activation(normal(1, 8), "relu")


def test_silu_of_extremes() -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    assert_near(TRITON.gated_activation(gate_up, "silu"), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]], device=DEVICE))


def angles(num_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = normal(num_tokens, 1, head_dim // 2, seed=1)
    cos, sin = torch.cat((turns.cos(),) * 2, -1), torch.cat((-turns.sin(), turns.sin()), -1)
    return cos.to(dtype), sin.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (3, 22), (4, 64), (5, 96)])
def test_rotary(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    x = normal(5, num_heads + 2, head_dim, dtype=dtype)
    turns = angles(5, head_dim, dtype)
    for part in (x, x[:, 1:-1]):
        assert_near(TRITON.rotary(part, *turns), REFERENCE.rotary(part, *turns))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features"), [(1, 4200, 33), (16, 48, 30), (17, 300, 70), (130, 200, 140)]
)
def test_linear_int8(num_rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
    """Sums of integers are exact: in float32 the reference's bits, whatever the tiles are."""
    x = normal(num_rows, in_features, dtype=dtype) * torch.arange(1, num_rows + 1, device=DEVICE, dtype=dtype)[:, None]
    x[num_rows // 2] = 0.0
    bias = normal(out_features, dtype=dtype, seed=1)
    weight = linear_int8.pack_linear(normal(out_features, in_features, dtype=dtype, seed=2))
    for added in (None, bias):
        found, wanted = TRITON.linear_int8(x, weight, added), linear_int8.linear(x, weight, added)
        if dtype == torch.float32:
            assert torch.equal(found, wanted)
        else:
            assert_near(found, wanted)


def test_linear_int8_of_a_slice_and_of_a_row_alone() -> None:
    wide, weight = normal(40, 200), linear_int8.pack_linear(normal(50, 96, seed=1))
    x = wide[:, 8:104]
    whole = TRITON.linear_int8(x, weight, None)
    assert torch.equal(whole, linear_int8.linear(x, weight))
    assert torch.equal(TRITON.linear_int8(x[7:8], weight, None)[0], whole[7])
    turned = normal(96, 20).t()
    assert torch.equal(TRITON.linear_int8(turned, weight, None), linear_int8.linear(turned, weight))


# ---- the KV cache

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, FP8]


def empty_cache(dtype: torch.dtype, *shape: int) -> KVCache:
    """Shape: blocks, block size, KV heads, head_dim."""
    keys, values = (torch.zeros(shape, device=DEVICE).to(dtype) for _ in range(2))
    if dtype == torch.int8:
        return KVCache(keys, values, *(torch.zeros(shape[:-1], device=DEVICE) for _ in range(2)))
    if dtype == FP8:
        scales = torch.linspace(0.02, 0.5, shape[2], device=DEVICE)
        return KVCache(keys, values, key_head_scales=scales, value_head_scales=scales.flip(0) * 0.7)
    return KVCache(keys, values)


def assert_same_cache(found: KVCache, wanted: KVCache, exact: bool) -> None:
    for one, other in zip(found.tensors, wanted.tensors, strict=True):
        if exact:
            assert torch.equal(one.float(), other.float())  # zeros of either sign
        else:
            assert_near(one, other)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [22, 64])
def test_store_kv(dtype: torch.dtype, head_dim: int) -> None:
    mixed = normal(7, 9, head_dim) * 20
    mixed[2, 3] = 0.0
    key, value = mixed[:, 1:4], mixed[:, 5:8]
    slots = integers(11, 0, 6, -1, 3, 8)
    found, wanted = empty_cache(dtype, 3, 4, 3, head_dim), empty_cache(dtype, 3, 4, 3, head_dim)
    TRITON.store_kv(key, value, found, slots)
    REFERENCE.store_kv(key, value, wanted, slots)
    assert_same_cache(found, wanted, exact=dtype != torch.bfloat16 or not launch.INTERPRETED)


def test_fp8_rounds_every_kind_of_number_as_torch_does() -> None:
    """Normal and subnormal ones, ties, the largest and what is beyond it."""
    numbers = torch.cat((torch.linspace(-500, 500, 250), torch.linspace(-0.02, 0.02, 249), torch.tensor([1e9])))
    numbers = torch.cat((numbers, torch.arange(-6, 6) / 1024, torch.tensor([17.0, 19.0, 1.9375, 0.0])))
    key = numbers.to(DEVICE).view(1, 1, -1)
    found, wanted = empty_cache(FP8, 1, 1, 1, key.shape[-1]), empty_cache(FP8, 1, 1, 1, key.shape[-1])
    for cache in (found, wanted):
        assert cache.key_head_scales is not None
        cache.key_head_scales.fill_(1.0)
    TRITON.store_kv(key, key, found, integers(0))
    REFERENCE.store_kv(key, key, wanted, integers(0))
    assert_same_cache(found, wanted, exact=True)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, FP8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 8), (6, 2, 22), (7, 1, 64)])
def test_rotary_store(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, norm: bool) -> None:
    compute = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    qkv = normal(5, num_heads + 2 * num_kv_heads, head_dim, dtype=compute)
    heads = HeadNorm(normal(head_dim, dtype=compute, seed=3), normal(head_dim, dtype=compute, seed=4), 1e-5)
    shape = (3, 4, num_kv_heads, head_dim)
    found, wanted = empty_cache(dtype, *shape), empty_cache(dtype, *shape)
    arguments = (qkv, *angles(5, head_dim, compute), heads if norm else None)
    slots = integers(11, 0, -1, 6)
    assert_near(
        TRITON.rotary_store(*arguments, found, slots), rotary_store.rotary_store(*arguments, wanted, slots), 2.0
    )
    blocks = torch.arange(3, device=DEVICE)
    step = {torch.int8: 1 / 127, FP8: 1 / 8}.get(dtype, 0.0)  # where rounding differs by a bit, a step may
    for read in (KVCache.read_keys, KVCache.read_values):
        one, other = read(found, blocks).float(), read(wanted, blocks).float()
        bound = TOLERANCE[compute] * 4 + step * other.abs().amax(-1, keepdim=True)
        assert bool(((one - other).abs() <= bound).all())
        assert float((one - other).abs().mean()) < 0.02


# ---- attention


@dataclass
class Paged:
    """A random cache and sequences in it; blocks that none holds are full of huge values, which must not be seen."""

    query_lens: list[int]
    seq_lens: list[int]
    heads: tuple[int, int, int]  # query heads, KV heads, head_dim
    block_size: int
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        num_heads, num_kv_heads, head_dim = self.heads
        counts = [-(-length // self.block_size) for length in self.seq_lens]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        self.tables = torch.zeros(len(self.seq_lens), max(counts), dtype=torch.int64, device=DEVICE)
        for index, count in enumerate(counts):
            self.tables[index, :count] = order[sum(counts[:index]) : sum(counts[: index + 1])]
        shape = (len(order), self.block_size, num_kv_heads, head_dim)
        self.cache = empty_cache(self.kv_dtype or self.dtype, *shape)
        slots = torch.arange(len(order) * self.block_size, device=DEVICE)
        key, value = (normal(len(slots), num_kv_heads, head_dim, seed=seed) for seed in (1, 2))
        for tensor in (key, value):
            tensor.view(shape)[order[-2:]] = 1e6 if self.dtype != torch.float16 else 6e4
        REFERENCE.store_kv(key, value, self.cache, slots)
        self.query = normal(sum(self.query_lens) + 3, num_heads + 2, head_dim, dtype=self.dtype)[:, :num_heads]

    def wanted(self, window: int, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        plan = attention.plan_attention(self.query_lens, self.seq_lens, self.tables, self.block_size, [window])
        return REFERENCE.paged_attention(self.query, self.cache, plan, self.scale, window, softcap, sinks)

    def found(self, window: int, split: int = 64, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        shape = AttentionShape(((self.heads[0] // self.heads[1], self.heads[2]),))
        kernels = triton_kernels(shape)
        plan_attention = kernels.plan_attention
        plan_attention.keywords["split"] = split  # type: ignore[attr-defined]
        plan = plan_attention(self.query_lens, self.seq_lens, self.tables, self.block_size, [window])
        return kernels.paged_attention(self.query, self.cache, plan, self.scale, window, softcap, sinks)

    @property
    def scale(self) -> float:
        return float(self.heads[2] ** -0.5)


MIXED = ([1, 1, 4, 30, 1, 5], [1, 65, 4, 100, 64, 33])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 21])
@pytest.mark.parametrize(("heads", "block_size"), [((2, 2, 8), 8), ((6, 2, 22), 16), ((7, 1, 64), 32)])
def test_paged_attention(heads: tuple[int, int, int], block_size: int, window: int, dtype: torch.dtype) -> None:
    paged = Paged(*MIXED, heads, block_size, dtype)
    found = paged.found(window)
    assert_near(found, paged.wanted(window))
    assert not found[-3:].any()


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_attention_sees_nothing_that_an_earlier_sequence_left(kv_dtype: torch.dtype) -> None:
    """A block comes as it was freed: where a model computed no numbers for one request, others do not see them."""
    paged = Paged([1, 1, 4, 30], [1, 65, 4, 37], (6, 2, 16), 16, kv_dtype=kv_dtype)
    before = paged.found(0)
    slots = [
        paged.tables[i, length // 16] * 16 + torch.arange(length % 16, 16, device=DEVICE)
        for i, length in enumerate(paged.seq_lens)
    ]
    for number in (float("nan"), float("inf")):
        left = torch.full((sum(map(len, slots)), 2, 16), number, device=DEVICE)
        if kv_dtype == torch.int8:
            assert paged.cache.key_scales is not None and paged.cache.value_scales is not None
            for scales in (paged.cache.key_scales, paged.cache.value_scales):
                scales.view(-1, 2)[torch.cat(slots)] = number
        else:
            REFERENCE.store_kv(left, left, paged.cache, torch.cat(slots))
        assert torch.equal(paged.found(0), before)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    paged = Paged([1, 3], [40, 17], (8, 2, head_dim), 16, dtype)
    assert_near(paged.found(0), paged.wanted(0))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 129, 300])
@pytest.mark.parametrize("queries", [1, 4])
def test_lengths_about_blocks_tiles_and_splits(length: int, queries: int) -> None:
    paged = Paged([min(queries, length), 1], [length, 2], (4, 2, 16), 16)
    for window in (0, 50):
        assert_near(paged.found(window), paged.wanted(window))


@pytest.mark.parametrize("queries", [64, 65, 129])
def test_prompts(queries: int) -> None:
    """Of one piece, of several, and behind what was computed before; with more queries than are ever cut."""
    paged = Paged([queries, 1, queries], [queries, 7, queries + 40], (4, 2, 16), 16)
    assert_near(paged.found(0), paged.wanted(0))


def test_more_work_than_programs() -> None:
    paged = Paged([1] * 12, [60 + index for index in range(12)], (4, 2, 16), 16)
    assert len(paged.query_lens) * 2 * 3 > PROGRAMS * launch.num_processors(DEVICE) or DEVICE.type == "cuda"
    assert_near(paged.found(0, split=32), paged.wanted(0))


def latent_paged(heads: int, rank: int, rotated: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Paged:
    """Whose values are the first features of its keys."""
    paged = Paged([1, 3, 20, 1], [70, 33, 20, 200], (heads, 1, rank + rotated), 16, dtype, kv_dtype)
    keys = paged.cache.keys
    scales = paged.cache.key_scales, paged.cache.key_scales, paged.cache.key_head_scales, paged.cache.key_head_scales
    paged.cache = KVCache(keys, keys[..., :rank], *scales, latent=True)
    return paged


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8, FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "rank", "rotated"), [(4, 32, 16), (6, 48, 16), (40, 272, 16)])
def test_latent_attention(heads: int, rank: int, rotated: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Of all heads in a tile, or of a part of them where keys are wide."""
    paged = latent_paged(heads, rank, rotated, dtype, kv_dtype)
    found = paged.found(0)
    assert found.shape == (28, heads, rank)
    assert_near(found, paged.wanted(0))
    assert not found[-3:].any()


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8, FP8])
def test_latents_are_stored_once(kv_dtype: torch.dtype) -> None:
    key, slots = normal(6, 1, 40), torch.tensor([3, 40, -1, 17, 8], device=DEVICE)
    wanted, found = (latent_paged(2, 24, 16, torch.float32, kv_dtype).cache for _ in range(2))
    REFERENCE.store_kv(key, None, wanted, slots)
    TRITON.store_kv(key, None, found, slots)
    assert len(found.tensors) == (2 if kv_dtype == torch.int8 else 1)
    for one, other in zip(found.tensors, wanted.tensors, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", [torch.int8, FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_eight_bits(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    paged = Paged([1, 3, 20], [70, 33, 20], (4, 2, 32), 16, dtype, kv_dtype)
    assert_near(paged.found(0), paged.wanted(0))
    assert_near(paged.found(9), paged.wanted(9))


@pytest.mark.parametrize(
    ("softcap", "with_sinks", "dtype"),
    [(0.0, True, torch.float32), (0.7, False, torch.float32), (0.7, True, torch.float32), (0.7, True, torch.bfloat16),
     (30.0, False, torch.bfloat16), (30.0, True, torch.float32)],
)  # fmt: skip
def test_softcaps_and_sinks(softcap: float, with_sinks: bool, dtype: torch.dtype) -> None:
    """In tiles, and in parts of contexts, where a sink counts once and not in each."""
    paged = Paged(*MIXED, (6, 2, 22), 16, dtype)
    sinks = normal(6, seed=5) * 3 if with_sinks else None
    for window in (0, 21):
        found = paged.found(window, softcap=softcap, sinks=sinks)
        assert_near(found, paged.wanted(window, softcap, sinks))
        assert not found[-3:].any()


@pytest.mark.parametrize("kv_dtype", [torch.int8, FP8])
def test_softcaps_and_sinks_over_eight_bits(kv_dtype: torch.dtype) -> None:
    """What is capped is the score of the key that was stored: with its scale."""
    paged, sinks = Paged([1, 3, 20], [70, 33, 20], (4, 2, 32), 16, torch.float32, kv_dtype), normal(4, seed=5)
    assert_near(paged.found(0, softcap=1.5, sinks=sinks), paged.wanted(0, 1.5, sinks))


@pytest.mark.parametrize("size", [1e4, -1e4, float("-inf")])
def test_a_sink_of_any_size(size: float) -> None:
    paged = Paged([1, 20, 1], [150, 33, 9], (4, 2, 16), 16)
    sinks = torch.full((4,), size, device=DEVICE)
    assert_near(paged.found(0, sinks=sinks), paged.wanted(0, 0.0, sinks))


def test_padding_of_a_graph_with_sinks_holds_zeros() -> None:
    """A tile that sees no key has a sum nevertheless."""
    paged = Paged([1, 1], [33, 5], (4, 2, 16), 16)
    plan = triton_kernels(AttentionShape(((2, 16),))).static_attention
    assert plan is not None
    static = plan(paged.tables.int(), [0], 5, 1, 64)
    static.fill(np.array([0, 1]), np.array([1, 1]), np.array([33, 5]))
    found = TRITON.paged_attention(paged.query, paged.cache, static.metadata, paged.scale, 0, 2.0, normal(4, seed=5))
    assert_near(found[:2], paged.wanted(0, 2.0, normal(4, seed=5))[:2])
    assert not found[2:].any()


def test_a_sequence_is_alone() -> None:
    """Its bits do not depend on who else is in the step, as long as tiles have one shape."""
    lengths = [300, 40, 131]
    whole = Paged([1, 1, 1], lengths, (4, 2, 16), 16)
    together = whole.found(0)
    for index, length in enumerate(lengths):
        one = replace(whole, query_lens=[1], seq_lens=[length])
        one.tables, one.cache, one.query = whole.tables[index : index + 1], whole.cache, whole.query[index:]
        assert torch.equal(one.found(0)[0], together[index])


# ---- noise and sampling


@triton.jit
def hash_tokens(firsts: tl.tensor, seconds: tl.tensor, out: tl.tensor, near: tl.tensor, exact: tl.tensor) -> None:
    row, tokens = tl.program_id(0), tl.arange(0, 256)
    first, second = tl.load(firsts + row).to(tl.uint32), tl.load(seconds + row).to(tl.uint32)
    bits = noise.token_bits(first, second, tokens)
    tl.store(out + row * 256 + tokens, bits.to(tl.int64))
    tl.store(near + row * 256 + tokens, noise.near_gumbel(bits))
    tl.store(exact + row * 256 + tokens, noise.gumbel(bits))


def test_noise_has_the_reference_s_bits() -> None:
    seeds = integers(0, -1, 42, 2**63 - 1, -(2**63), 1311768467463790320)
    keys = row_keys(seeds, integers(0, 5, 2048, 131071, 3, 1000))
    out = torch.empty(len(seeds), 256, dtype=torch.int64, device=DEVICE)
    near, exact = out.float(), out.double()
    hash_tokens[(len(seeds),)](*keys, out, near, exact)
    tokens = torch.arange(256, device=DEVICE)
    first, second = (key[:, None] for key in keys)
    assert torch.equal(out, token_bits(first, second, tokens))
    wanted = gumbel_noise(first, second, tokens)
    torch.testing.assert_close(exact, wanted, atol=1e-12, rtol=1e-12)
    assert float((near - wanted).abs().max()) < noise.ERROR.value / 10


@triton.jit
def approximate(out: tl.tensor, words: tl.tensor) -> None:
    places = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(out + places, noise.near_gumbel(tl.load(words + places).to(tl.uint32)))


def test_approximate_noise_at_both_ends() -> None:
    """Every one of the uniforms nearest to zero and to one, and some between."""
    size = 1 << 24
    uniforms = torch.cat((torch.arange(4096), torch.arange(size - 8192, size), torch.arange(0, size, size // 4096)))
    words, out = (uniforms << 8).to(DEVICE), torch.empty(len(uniforms), device=DEVICE)
    approximate[(len(uniforms) // 4096,)](out, words)
    exact = -torch.log(-torch.log((uniforms.to(DEVICE).double() + 0.5) / size))
    assert float((out - exact).abs().max()) < noise.ERROR.value / 10


@pytest.mark.parametrize("vocab_size", [1, 100, 4096, 4097, 9000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax(vocab_size: int, dtype: torch.dtype) -> None:
    logits = normal(5, vocab_size, dtype=dtype)
    logits[1] = 1.0
    logits[2, vocab_size // 2 :] = logits[2].max() + 1
    assert torch.equal(TRITON.sampling.argmax(logits), REFERENCE.sampling.argmax(logits))


def test_argmax_of_nothing() -> None:
    assert TRITON.sampling.argmax(torch.full((2, 9), NOTHING, device=DEVICE)).tolist() == [0, 0]


@pytest.mark.parametrize("scale", [0.0, 0.1, 2.0, 30.0, 1e6])
@pytest.mark.parametrize("vocab_size", [1, 100, 2048, 5000])
def test_gumbel_argmax(vocab_size: int, scale: float) -> None:
    values = normal(12, vocab_size, seed=vocab_size) * scale
    keys = row_keys(torch.arange(12, device=DEVICE) - 6, torch.arange(12, device=DEVICE) * 7)
    cut, last_tied = torch.full((12,), NOTHING, device=DEVICE), torch.full((12,), vocab_size, device=DEVICE)
    found = TRITON.sampling.gumbel_argmax(values, cut, last_tied, keys)
    assert torch.equal(found, REFERENCE.sampling.gumbel_argmax(values, cut, last_tied, keys))


def test_gumbel_argmax_of_ties_and_of_nothing() -> None:
    values = normal(20, 3000).round()
    keys = row_keys(torch.arange(20, device=DEVICE), torch.arange(20, device=DEVICE))
    cut, last_tied = values.quantile(0.5, dim=1).round(), torch.full((20,), 1000, device=DEVICE)
    last_tied[::2] = 3000
    values[7], cut[7] = NOTHING, NOTHING
    found = TRITON.sampling.gumbel_argmax(values, cut, last_tied, keys)
    assert torch.equal(found, REFERENCE.sampling.gumbel_argmax(values, cut, last_tied, keys))
    assert int(found[7]) == 0


Limits = tuple[float, int, float]  # min_p, top_k, top_p


def columns(limits: Sequence[Limits]) -> tuple[Tensor, Tensor, Tensor]:
    min_p, top_k, top_p = (torch.tensor(column, device=DEVICE) for column in zip(*limits, strict=True))
    return min_p.double().log(), top_k.long(), top_p.double()


LIMITS: list[Limits] = [
    (0.0, 0, 1.0), (0.1, 0, 1.0), (1.0, 0, 1.0), (0.0, 1, 1.0), (0.0, 7, 1.0), (0.0, 10**6, 1.0), (0.0, 0, 0.9),
    (0.0, 0, 1e-9), (0.0, 0, 0.9999999), (0.02, 8, 0.9), (0.0, 40, 0.5), (0.3, 0, 0.7),
]  # fmt: skip


@pytest.mark.parametrize("scale", [0.2, 3.0, 12.0])
@pytest.mark.parametrize("vocab_size", [12, 3000])
def test_truncation(vocab_size: int, scale: float) -> None:
    values = normal(len(LIMITS), vocab_size) * scale
    limits = columns(LIMITS)
    cut, last_tied = triton_truncation.truncation(values, *limits)
    wanted = truncation.truncation(values, *limits)
    assert torch.equal(cut, wanted[0])
    assert torch.equal(last_tied, wanted[1])


def test_truncation_among_equals() -> None:
    """A nucleus ends in the middle of them, at the lowest ids; and the row is wider than what is gathered."""
    limits = columns(LIMITS)
    values = (normal(len(LIMITS), 5000) / 2).round()
    cut, last_tied = triton_truncation.truncation(values, *limits)
    wanted = truncation.truncation(values, *limits)
    assert torch.equal(cut, wanted[0])
    # Sums of thousands of equals differ in their last bits, so that one more or less may be needed.
    places = (values == cut[:, None]).cumsum(1)
    ranks = [places.gather(1, last.clamp(max=4999)[:, None]) for last in (last_tied, wanted[1])]
    assert int((ranks[0] - ranks[1]).abs().max()) <= 1
    assert torch.equal(last_tied == 5000, wanted[1] == 5000)


def test_truncation_of_nothing() -> None:
    values = torch.full((len(LIMITS), 30), NOTHING, device=DEVICE)
    cut, _ = triton_truncation.truncation(values, *columns(LIMITS))
    assert bool((cut == NOTHING).all())


@pytest.mark.parametrize("vocab_size", [20, 2500])
def test_penalties(vocab_size: int) -> None:
    logits = normal(4, vocab_size) * 3
    tokens = torch.randint(0, 15, (6, 2100), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows, lengths, num_prompt = integers(5, 0, 2, 0), integers(9, 2100, 1, 60), integers(4, 30, 1, 60)
    factors = (
        torch.tensor([1.3, 0.8, 1.0, 2.0], device=DEVICE),
        torch.tensor([0.0, 0.01, 1.0, 0.5], device=DEVICE),
        torch.tensor([0.5, -1.0, 0.0, 0.3], device=DEVICE),
    )
    found = logits.clone()
    triton_penalties.penalise(found, tokens, rows, lengths, num_prompt, factors)
    penalties.penalise(logits, tokens, rows, lengths, num_prompt, factors)
    assert_near(found, logits, 10.0)


def test_bad_words() -> None:
    """Of one token, of more than are compared at once, longer than a history; wrong in the first or the last place."""
    words = [[4], [7, 8, 5], [8, 5], [9, 6], [*range(20), 3], [*range(50), 2], [7, 7, 1], [0, 19, 1]]
    flat = integers(*(token for word in words for token in word), dtype=torch.int32)
    histories = torch.full((4, 60), 30, device=DEVICE)
    histories[2, :3], histories[0, :22] = integers(6, 7, 8), torch.tensor([1, 2, *range(20)], device=DEVICE)
    starts = [sum(map(len, words[:index])) for index in range(len(words))]
    ends = [(0, 2, 3), (1, 0, 22), (2, 2, 2), (3, 0, 0)]  # rows of logits and histories, tokens
    pairs = [(*one, start, len(word)) for one in ends for start, word in zip(starts, words, strict=True)]
    table = torch.tensor(pairs, dtype=torch.int32, device=DEVICE)
    found, wanted = (torch.zeros(4, 40, device=DEVICE) for _ in range(2))
    triton_bad_words.forbid_words(found, histories, flat, table)
    bad_words.forbid_words(wanted, histories, flat, table)
    assert torch.equal(found, wanted)
    forbidden = [(one == NOTHING).nonzero()[:, 0].tolist() for one in found]
    assert forbidden == [[4, 5], [3, 4], [4], [4]]


# ---- speculation


def targets(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    values = normal(9, vocab_size) * 2
    cut, last_tied = truncation.truncation(values, *columns(LIMITS[:9]))
    values[8], cut[8] = NOTHING, NOTHING
    return values, cut, last_tied


@pytest.mark.parametrize("vocab_size", [12, 3000])
def test_accepts(vocab_size: int) -> None:
    kept = targets(vocab_size)
    outcomes = set()
    for draft in range(0, vocab_size, max(1, vocab_size // 6)):
        keys = row_keys(torch.arange(9, device=DEVICE), torch.full((9,), draft, device=DEVICE))
        for probability in (1.0, 0.3, 1e-3):
            proposed = torch.full((9,), probability, device=DEVICE).double()
            arguments = (*kept, torch.full((9,), draft, device=DEVICE), proposed, keys)
            found = triton_rejection.accepts(*arguments)
            assert torch.equal(found, rejection.accepts(*arguments))
            assert not bool(found[8])
            outcomes |= set(found.tolist())
    assert outcomes == {True, False}


@pytest.mark.parametrize("vocab_size", [12, 3000])
def test_log_residual(vocab_size: int) -> None:
    kept = targets(vocab_size)
    probs = torch.tensor([0.5, 0.5, 1.0, 0.01, 0.2], device=DEVICE).double()
    entries = (integers(0, 0, 1, 3, 6), integers(3, 0, 11, 5, 2), probs)
    found, wanted = triton_rejection.log_residual(*kept, *entries)[:8], rejection.log_residual(*kept, *entries)[:8]
    assert torch.equal(found == NOTHING, wanted == NOTHING)
    torch.testing.assert_close(found.exp(), wanted.exp(), atol=1e-6, rtol=1e-4)
    left_out = (integers(0, 0, 1, 3, 6, -1, -1), integers(3, 0, 11, 5, 2, 3, 0), torch.cat((probs, probs[:2])))
    assert torch.equal(triton_rejection.log_residual(*kept, *left_out)[:8], found)
    assert torch.equal(rejection.log_residual(*kept, *left_out)[:8], wanted)
    none = (integers(), integers(), torch.tensor([], device=DEVICE).double())
    torch.testing.assert_close(
        triton_rejection.log_residual(*kept, *none)[:8], rejection.log_residual(*kept, *none)[:8], atol=1e-4, rtol=1e-5
    )


def test_draft_verification() -> None:
    """No draft at all, all right, wrong at each position; a token that equals one beyond the first wrong one."""
    drafts = [[], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [4]]
    taken = [[9], [5, 6, 7, 8], [1, 6, 7, 8], [5, 1, 7, 8], [5, 6, 1, 8], [4, 3]]
    starts = torch.tensor([0, *(len(one) for one in taken[:-1])]).cumsum(0).to(DEVICE, torch.int32)
    chosen = integers(*(token for one in taken for token in one))
    padded = integers(*(token for one in drafts for token in [*one, -1]), dtype=torch.int32)
    rows, lengths = integers(3, 0, 5, 1, 2, 4, dtype=torch.int32), integers(2, 0, 4, 1, 3, 5, dtype=torch.int32)
    found, wanted = (torch.full((6, 10), 77, device=DEVICE) for _ in range(2))
    accepted = triton_verification.verify_drafts(chosen, padded, starts, found, rows, lengths)
    assert accepted.tolist() == [0, 3, 0, 1, 2, 1]
    ours = (one.cpu() for one in (chosen, padded, starts, wanted, rows, lengths))  # numpy reads the host's memory
    chosen, padded, starts, wanted, rows, lengths = ours
    assert torch.equal(accepted.cpu(), draft_verification.verify_drafts(chosen, padded, starts, wanted, rows, lengths))
    assert torch.equal(found.cpu(), wanted)
    assert found[1].tolist() == [77, 5, 1, *[77] * 7]


# ---- rows of the worker


def test_row_writes() -> None:
    found, wanted = (torch.zeros(9, 700, dtype=torch.int32, device=DEVICE) for _ in range(2))
    rows, begins = integers(8, 0, 3, 0, dtype=torch.int32), integers(699, 0, 50, 4, dtype=torch.int32)
    counts = [1, 3, 600, 5]
    starts = torch.tensor([0, *counts]).cumsum(0).to(DEVICE, torch.int32)
    values = torch.arange(sum(counts), dtype=torch.int32, device=DEVICE) + 1
    triton_row_writes.write_rows(found, rows, begins, starts, values)
    row_writes.write_rows(wanted, rows, begins, starts, values)
    assert torch.equal(found, wanted)
    assert int((found > 0).sum()) == sum(counts)


@pytest.mark.parametrize("scheduled", [[1], [1, 1, 1, 1], [300, 1, 7], [1, 255, 2]])
def test_step_inputs(scheduled: list[int]) -> None:
    tokens = torch.randint(0, 500, (6, 400), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    tables = torch.randperm(6 * 25, generator=torch.Generator().manual_seed(1)).view(6, 25).to(DEVICE, torch.int32)
    count = len(scheduled)
    rows = integers(5, 0, 3, 2, dtype=torch.int32)[:count]
    computed = integers(17, 0, 90, 31, dtype=torch.int32)[:count]
    starts = torch.tensor([0, *scheduled]).cumsum(0).to(DEVICE, torch.int32)
    for padding in (0, 3):
        arguments = (tokens, tables, rows, computed, starts, 16, sum(scheduled) + padding)
        for found, wanted in zip(TRITON.step_inputs(*arguments), step_inputs.step_inputs(*arguments), strict=True):
            assert torch.equal(found, wanted)
