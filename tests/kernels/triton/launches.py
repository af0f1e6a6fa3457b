"""One launch of every kernel, for a shape: to be compiled for a card that is not there, or run on tiny tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.interface import AttentionShape, Kernels
from kernels.ops.attention.kv_cache import FP8, KVCache
from kernels.ops.attention.rotary_store import HeadNorm
from kernels.ops.experts.experts import ExpertWeights, Routing
from kernels.ops.experts.experts_decoded import pack_experts_decoded
from kernels.ops.layers import activation
from kernels.ops.linears import linear, linear_decoded, linear_fp8, linear_int8
from kernels.ops.linears.lora import LoraWeights
from kernels.ops.states.state_plan import StatePlan
from kernels.provider import triton_kernels
from kernels.triton.sampling.bad_words import forbid_words
from kernels.triton.sampling.draft_verification import verify_drafts
from kernels.triton.sampling.penalties import penalise
from kernels.triton.sampling.rejection import accepts, log_residual
from kernels.triton.sampling.truncation import truncation
from kernels.triton.steps.row_writes import write_rows
from scripts.bench.gpu.linears import decoded_kinds
from scripts.bench.gpu.shapes import GpuModelShape

BLOCK, ROWS = 16, 4  # tokens of a block, sequences
EXPERTS, INNER = 16, 64  # features of an expert: few, because the kernels do not depend on how many there are
ROUTINGS = {
    "softmax": Routing("softmax", 4, renormalise=True),
    "softmax of chosen": Routing("softmax_of_chosen", 4, renormalise=True),
    "sigmoid, groups": Routing("sigmoid", 4, renormalise=True, groups=4, kept_groups=2),
}
LATENT_HEADS, RANK, ROTATED = 128, 512, 64  # DeepSeek-V3's
DELTA_HEADS = 4, 8, 128  # of keys, of values, and their size
Launch = Callable[[], object]


class Catalogue:
    """Tensors are zero: what is said of a launch here does not depend on what is in them."""

    def __init__(self, shape: GpuModelShape, dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self._context = min(600, shape.max_position_embeddings)  # longer than a part, where it can be
        heads = (shape.num_attention_heads // shape.num_key_value_heads, shape.head_dim)
        known = AttentionShape((heads,), shape.max_position_embeddings)
        self._kernels: Kernels = triton_kernels(known)
        self._early = triton_kernels(known, early=True)

    def launches(self) -> Iterator[tuple[str, Launch]]:
        yield from self._attention()
        yield from self._latents()
        yield from self._layers()
        yield from self._early_ones()
        yield from self._experts()
        yield from self._linear_attention()
        yield from self._sampling()
        yield from self._rows()
        yield from self._adapters()

    def _adapters(self) -> Iterator[tuple[str, Launch]]:
        size, adapters = self._shape.head_dim * self._shape.num_attention_heads, torch.zeros(ROWS, dtype=torch.int64)
        for rank in (16, 256):
            weights = LoraWeights.empty((size, 64, 64), size, 2, rank, self._dtype)
            x, y = (torch.zeros(ROWS, n, dtype=self._dtype) for n in (size, size + 128))
            yield f"adapters of rank {rank}", partial(self._kernels.lora, x, y, weights, adapters)

    def _attention(self) -> Iterator[tuple[str, Launch]]:
        dtype = self._dtype
        for name, queries, kv_dtype, window in (
            ("decode", 1, dtype, 0), ("verify 5", 5, dtype, 0), ("prefill", 64, dtype, 0), ("window", 1, dtype, 100),
            ("decode, int8 cache", 1, torch.int8, 0), ("decode, fp8 cache", 1, FP8, 0),
        ):  # fmt: skip
            yield f"attention: {name}", lambda q=queries, kv=kv_dtype, w=window: self._attend(q, kv, w)  # type: ignore[misc]
        for name, queries in (("decode", 1), ("prefill", 64)):
            yield f"attention: {name}, softcap", lambda q=queries: self._attend(q, dtype, 0, softcap=50.0)  # type: ignore[misc]
            yield f"attention: {name}, sinks", lambda q=queries: self._attend(q, dtype, 128, sinks=True)  # type: ignore[misc]

    def _attend(
        self, queries: int, kv_dtype: torch.dtype, window: int, *, softcap: float = 0.0, sinks: bool = False
    ) -> Tensor:
        shape, kernels = self._shape, self._kernels
        tables = torch.zeros(ROWS, -(-self._context // BLOCK), dtype=torch.int64)
        plan = kernels.plan_attention([queries] * ROWS, [self._context] * ROWS, tables, BLOCK, [window])
        query = torch.zeros(queries * ROWS, shape.num_attention_heads, shape.head_dim, dtype=self._dtype)
        held = torch.zeros(shape.num_attention_heads) if sinks else None
        return kernels.paged_attention(query, self._cache(kv_dtype), plan, shape.head_dim**-0.5, window, softcap, held)

    def _latents(self) -> Iterator[tuple[str, Launch]]:
        dtype, width = self._dtype, RANK + ROTATED
        key, slots = torch.zeros(ROWS, 1, width, dtype=dtype), torch.arange(ROWS)
        for name, kv_dtype in (("", dtype), (", int8 cache", torch.int8), (", fp8 cache", FP8)):
            cache = _latent_cache(kv_dtype)
            yield f"store_kv: latents{name}", lambda cache=cache: self._kernels.store_kv(key, None, cache, slots)  # type: ignore[misc]
            for heads, queries in ((16, 1), (16, 64), (LATENT_HEADS, 1), (LATENT_HEADS, 64)):
                label = f"attention: latents, {heads} heads, {queries} queries{name}"
                yield label, partial(self._attend_latents, heads, queries, cache)

    def _attend_latents(self, heads: int, queries: int, cache: KVCache) -> Tensor:
        kernels = triton_kernels(AttentionShape(((heads, RANK + ROTATED),), self._context))
        tables = torch.zeros(ROWS, -(-self._context // BLOCK), dtype=torch.int64)
        plan = kernels.plan_attention([queries] * ROWS, [self._context] * ROWS, tables, BLOCK, [0])
        query = torch.zeros(queries * ROWS, heads, RANK + ROTATED, dtype=self._dtype)
        return kernels.paged_attention(query, cache, plan, 0.1, 0)

    def _cache(self, dtype: torch.dtype) -> KVCache:
        heads = self._shape.num_key_value_heads
        keys, values = (torch.zeros(ROWS, BLOCK, heads, self._shape.head_dim).to(dtype) for _ in range(2))
        if dtype == torch.int8:
            return KVCache(keys, values, *(torch.zeros(ROWS, BLOCK, heads) for _ in range(2)))
        if dtype == FP8:
            return KVCache(keys, values, key_head_scales=torch.ones(heads), value_head_scales=torch.ones(heads))
        return KVCache(keys, values)

    def _layers(self) -> Iterator[tuple[str, Launch]]:
        shape, kernels, dtype = self._shape, self._kernels, self._dtype
        x, weight = torch.zeros(ROWS, shape.hidden_size, dtype=dtype), torch.zeros(shape.hidden_size, dtype=dtype)
        yield "rms_norm", lambda: kernels.rms_norm(x, weight, 1e-5)
        yield "add_rms_norm", lambda: kernels.add_rms_norm(x, x, weight, 1e-5)
        yield "layer_norm", lambda: kernels.layer_norm(x, weight, None, 1e-5)
        yield "layer_norm, bias", lambda: kernels.layer_norm(x, weight, weight, 1e-5)
        gates = torch.zeros(ROWS, 2 * shape.intermediate_size, dtype=dtype)
        for kind in activation.GATED:
            yield f"gated_activation, {kind}", lambda k=kind: kernels.gated_activation(gates, k)  # type: ignore[misc]
        for kind in activation.PLAIN:
            yield f"activation, {kind}", lambda k=kind: kernels.activation(gates, k)  # type: ignore[misc]
        packed = linear_int8.pack_linear(torch.zeros(shape.intermediate_size, shape.hidden_size, dtype=dtype))
        for num_rows in (1, 48, 200):
            some = x[:1].expand(num_rows, -1)
            yield f"linear_int8, {num_rows} rows", lambda s=some: kernels.linear_int8(s, packed, None)  # type: ignore[misc]
        plain = linear.pack_linear(torch.zeros(shape.intermediate_size, shape.hidden_size, dtype=dtype))
        yield "linear, 1 row", lambda: kernels.linear(x[:1], plain, weight[:1].expand(shape.intermediate_size))
        for kind, codes in decoded_kinds(shape.intermediate_size, shape.hidden_size).items():
            if kind.startswith("E4M3"):
                octets = linear_fp8.pack_codes(codes), linear_fp8.pack_linear(plain.weight)
                for packed_octets in octets:
                    for num_rows in (1, 48, 200):
                        label = f"linear_fp8, {num_rows} rows, groups of {packed_octets.group or 'all'}"
                        some = x[:1].expand(num_rows, -1)
                        yield label, lambda s=some, w=packed_octets: kernels.linear_fp8(s, w, None)  # type: ignore[misc]
            decoded = linear_decoded.pack_decoded(codes)
            for num_rows in (1, 200) if kind.startswith("4") else (200,):
                for some in (x[:1].expand(num_rows, -1), x[:1].float().expand(num_rows, -1)):
                    yield f"{kind}, {num_rows} rows", lambda s=some, w=decoded: kernels.linear(s, w, None)  # type: ignore[misc]
        heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
        qkv = torch.zeros(ROWS, heads, shape.head_dim, dtype=dtype)
        turns = torch.zeros(ROWS, 1, shape.head_dim, dtype=dtype)
        scale = torch.zeros(shape.head_dim, dtype=dtype)
        norm = HeadNorm(scale, scale, 1e-6)
        slots = torch.arange(ROWS)
        yield "rotary", lambda: kernels.rotary(qkv, turns, turns)
        kv = qkv[:, -shape.num_key_value_heads :]
        for name, kv_dtype in (("", dtype), (", int8 cache", torch.int8), (", fp8 cache", FP8)):
            cache = self._cache(kv_dtype)
            yield f"store_kv{name}", lambda cache=cache: kernels.store_kv(kv, kv, cache, slots)  # type: ignore[misc]
            for normed in (None, norm):
                label = f"rotary_store{name}{', norm' if normed else ''}"
                yield label, lambda n=normed, c=cache: kernels.rotary_store(qkv, turns, turns, n, c, slots)  # type: ignore[misc]

    def _early_ones(self) -> Iterator[tuple[str, Launch]]:
        """What a step of one token launches, where kernels may begin before the ones before them have ended."""
        shape, kernels, dtype = self._shape, self._early, self._dtype
        x, weight = torch.zeros(1, shape.hidden_size, dtype=dtype), torch.zeros(shape.hidden_size, dtype=dtype)
        yield "early: rms_norm", lambda: kernels.rms_norm(x, weight, 1e-5)
        yield "early: add_rms_norm", lambda: kernels.add_rms_norm(x, x, weight, 1e-5)
        plain = linear.pack_linear(torch.zeros(shape.intermediate_size, shape.hidden_size, dtype=dtype))
        yield "early: linear", lambda: kernels.linear(x, plain, None)
        gates = torch.zeros(1, 2 * shape.intermediate_size, dtype=dtype)
        yield "early: gated_activation", lambda: kernels.gated_activation(gates, "silu")
        yield "early: activation", lambda: kernels.activation(gates, "gelu_tanh")
        qkv = torch.zeros(1, shape.num_attention_heads + 2 * shape.num_key_value_heads, shape.head_dim, dtype=dtype)
        turns, cache = torch.zeros(1, 1, shape.head_dim, dtype=dtype), self._cache(dtype)
        yield "early: rotary_store", lambda: kernels.rotary_store(qkv, turns, turns, None, cache, torch.arange(1))
        tables = torch.zeros(1, -(-self._context // BLOCK), dtype=torch.int64)
        plan = kernels.plan_attention([1], [self._context], tables, BLOCK, [0])
        query = torch.zeros(1, shape.num_attention_heads, shape.head_dim, dtype=dtype)
        yield "early: attention", lambda: kernels.paged_attention(query, cache, plan, shape.head_dim**-0.5, 0)

    def _linear_attention(self) -> Iterator[tuple[str, Launch]]:
        dtype, kernels, (key_heads, value_heads, dim) = self._dtype, self._kernels, DELTA_HEADS
        channels = (2 * key_heads + value_heads) * dim
        x, taps, inputs = (torch.zeros(*shape, channels, dtype=dtype) for shape in ((ROWS,), (4,), (ROWS, 3)))
        ints = torch.arange(ROWS)
        plan = StatePlan(ints, torch.arange(ROWS + 1), ints)
        yield "causal_conv", lambda: kernels.causal_conv(x, taps, inputs, plan)
        keys, values = (torch.zeros(ROWS, heads, dim, dtype=dtype) for heads in (key_heads, value_heads))
        gates, states = torch.zeros(ROWS, value_heads), torch.zeros(ROWS, value_heads, dim, dim)
        yield "gated_delta_rule", lambda: kernels.gated_delta_rule(keys, keys, values, gates, gates, states, plan)

    def _experts(self) -> Iterator[tuple[str, Launch]]:
        hidden, dtype, kernels = self._shape.hidden_size, self._dtype, self._kernels
        for name, routing in ROUTINGS.items():
            logits, correction = torch.zeros(ROWS, EXPERTS), torch.zeros(EXPERTS) if routing.groups > 1 else None
            yield f"route: {name}", lambda r=routing, z=logits, c=correction: kernels.route(z, r, c)  # type: ignore[misc]
        for name, pack in (("", kernels.pack_experts), (", int8", kernels.pack_experts_int8)):
            gate_up = pack([torch.zeros(2 * INNER, hidden, dtype=dtype)] * EXPERTS, None)
            down = pack([torch.zeros(hidden, INNER, dtype=dtype)] * EXPERTS, torch.zeros(EXPERTS, hidden, dtype=dtype))
            for num_rows in (1, 200, 800):
                yield f"experts, {num_rows} rows{name}", partial(self._mix, num_rows, gate_up, down)
        for kind, num_rows in (("4 bits", 1), ("E2M1", 1), ("4 bits", 800), ("E2M1", 800), ("E4M3", 800)):
            wide, narrow = (decoded_kinds(*size) for size in ((2 * INNER, hidden), (hidden, INNER)))
            for name in (name for name in wide if name.startswith(kind)):
                coded = pack_experts_decoded([wide[name]] * EXPERTS, None)
                out = pack_experts_decoded([narrow[name]] * EXPERTS, torch.zeros(EXPERTS, hidden, dtype=dtype))
                yield f"experts, {num_rows} rows, {name}", partial(self._mix, num_rows, coded, out)

    def _mix(self, num_rows: int, gate_up: ExpertWeights, down: ExpertWeights) -> Tensor:
        x = torch.zeros(num_rows, self._shape.hidden_size, dtype=self._dtype)
        ids, weights = torch.zeros(num_rows, 4, dtype=torch.int64), torch.zeros(num_rows, 4)
        return self._kernels.experts(x, ids, weights, gate_up, down, "silu", True)

    def _sampling(self) -> Iterator[tuple[str, Launch]]:
        sampling, vocab_size = self._kernels.sampling, self._shape.vocab_size
        logits, held = torch.zeros(ROWS, vocab_size), torch.zeros(ROWS, vocab_size, dtype=self._dtype)
        ints, floats, doubles = torch.zeros(ROWS, dtype=torch.int64), torch.ones(ROWS), torch.ones(ROWS).double()
        histories = torch.zeros(ROWS, 64, dtype=torch.int64)
        yield "argmax", lambda: sampling.argmax(held)
        yield "gumbel_argmax", lambda: sampling.gumbel_argmax(logits, floats, ints, (ints, ints))
        yield "truncation", lambda: truncation(logits, doubles, ints, doubles)
        yield "penalise", lambda: penalise(logits, histories, ints, ints, ints, (floats, floats, floats))
        words, pairs = torch.zeros(8, dtype=torch.int32), torch.ones(ROWS, 5, dtype=torch.int32)
        yield "forbid_words", lambda: forbid_words(logits, histories, words, pairs)
        yield "accepts", lambda: accepts(logits, floats, ints, ints, doubles, (ints, ints))
        yield "log_residual", lambda: log_residual(logits, floats, ints, ints, ints, doubles)

    def _rows(self) -> Iterator[tuple[str, Launch]]:
        ints, small = torch.zeros(2 * ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int32)
        bounds, blocks = torch.arange(ROWS + 1, dtype=torch.int32), torch.zeros(ROWS, 64, dtype=torch.int32)
        starts = torch.arange(ROWS, dtype=torch.int32) * 2
        histories = torch.zeros(ROWS, 64, dtype=torch.int64)
        drafts = torch.full((2 * ROWS,), -1, dtype=torch.int32)
        yield "verify_drafts", lambda: verify_drafts(ints, drafts, starts, histories, small, small)
        yield "write_rows", lambda: write_rows(blocks, torch.arange(ROWS, dtype=torch.int32), small, bounds, small)
        yield "step_inputs", lambda: self._kernels.step_inputs(histories, blocks, small, small, bounds, BLOCK, ROWS)


def _latent_cache(dtype: torch.dtype) -> KVCache:
    keys = torch.zeros(ROWS, BLOCK, 1, RANK + ROTATED).to(dtype)
    per_token = torch.zeros(ROWS, BLOCK, 1) if dtype == torch.int8 else None
    per_head = torch.ones(1) if dtype == FP8 else None
    return KVCache(keys, keys[..., :RANK], per_token, per_token, per_head, per_head, latent=True)
