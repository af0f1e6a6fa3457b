"""Random decoders of any kind, for the native kernels and as plain arithmetic in float64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu import abi
from kernels.cpu.native import FORMATS, KVShape, Native, PackedLinear, StepColumns

BLOCK_SIZE, EPS = 16, 1e-5
Ints = NDArray[np.int64]
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    abi.SILU: torch.nn.functional.silu,
    abi.GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor | None  # [n]; None: there is none
    bias: Tensor | None = None  # [n]
    kind: int = abi.RMS_NORM

    @classmethod
    def random(cls, n: int, seed: int, kind: int = abi.RMS_NORM) -> Norm:
        return cls(1 + normal(n, seed=seed) / 3, normal(n, seed=seed + 1) / 3 if kind == abi.LAYER_NORM else None, kind)

    @property
    def struct(self) -> abi.PgNorm:
        return abi.PgNorm(*(None if one is None else one.data_ptr() for one in (self.weight, self.bias)), self.kind)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return x
        centred = x - x.mean(-1, keepdim=True) if self.kind == abi.LAYER_NORM else x
        scaled = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * self.weight.double()
        return scaled if self.bias is None else scaled + self.bias.double()


NO_NORM = Norm(None)


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor  # [n, k]
    bias: Tensor | None = None  # [n]

    @classmethod
    def random(cls, n: int, k: int, seed: int, *, bias: bool = False, scale: float = 1.0) -> Linear:
        return cls(normal(n, k, seed=seed) / math.sqrt(k) * scale, normal(n, seed=seed + 1) / 3 if bias else None)

    def pack(self, native: Native, dtype: torch.dtype, *, by_turns: bool = False) -> PackedLinear:
        n, k = self.weight.shape
        memory = torch.empty(native.packed_bytes(n, k, dtype), dtype=torch.uint8)
        if not by_turns:
            return native.pack_linear(self.weight, dtype, memory, self.bias)
        bias = None if self.bias is None else self.bias.view(2, -1)
        gate, up = self.weight.chunk(2)
        return native.pack_gate_up(gate, up, dtype, memory, bias)

    def __call__(self, x: Tensor) -> Tensor:
        product = x @ self.weight.double().t()
        return product if self.bias is None else product + self.bias.double()


@dataclass(frozen=True, slots=True)
class MLP:
    """Two linears and what stands between them."""

    first: Linear  # [2 inner, hidden], gate above up; [inner, hidden] without a gate
    second: Linear  # [hidden, inner]
    gated: bool = True
    activation: int = abi.SILU

    @classmethod
    def random(
        cls, hidden: int, inner: int, seed: int, *, gated: bool = True, activation: int = abi.SILU, bias: bool = False
    ) -> MLP:
        first = Linear.random(2 * inner if gated else inner, hidden, seed, bias=bias, scale=3)
        return cls(first, Linear.random(hidden, inner, seed + 2, bias=bias), gated, activation)

    @property
    def inner(self) -> int:
        return self.second.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.second(ACTIVATIONS[self.activation](self.first(x)))
        gate, up = self.first(x).chunk(2, dim=-1)
        if self.activation != abi.CLAMPED_SWIGLU:
            return self.second(ACTIVATIONS[self.activation](gate) * up)
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return self.second(gate * torch.sigmoid(1.702 * gate) * (up + 1))


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A router and its experts; their activation is the layer's."""

    router: Linear  # [count, hidden]
    experts: list[MLP]
    top_k: int
    score: int = abi.SOFTMAX
    renormalise: bool = False
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    correction: Tensor | None = None  # [count]
    shared_gate: Linear | None = None  # [1, hidden]
    held: list[object] = field(default_factory=list)

    def struct(self, native: Native, dtype: torch.dtype) -> abi.PgExperts:
        kept = dtype if dtype != torch.int8 else torch.float32
        router = self.router.pack(native, kept)
        gate = None if self.shared_gate is None else self.shared_gate.pack(native, kept)
        first = [expert.first.pack(native, dtype, by_turns=expert.gated) for expert in self.experts]
        second = [expert.second.pack(native, dtype) for expert in self.experts]
        tables = [(abi.PgLinear * len(packed))(*(one.struct for one in packed)) for packed in (first, second)]
        self.held.append((router, gate, first, second, tables))
        return abi.PgExperts(
            count=len(self.experts),
            top_k=self.top_k,
            inner=self.experts[0].inner,
            score=self.score,
            renormalise=self.renormalise,
            groups=self.groups,
            kept_groups=self.kept_groups,
            scale=self.scale,
            correction=None if self.correction is None else self.correction.data_ptr(),
            router=router.struct,
            gate_up=tables[0],
            down=tables[1],
            shared_gate=abi.PgLinear() if gate is None else gate.struct,
        )

    def route(
        self,
        x: Tensor,  # [n, hidden] float64
    ) -> tuple[Tensor, Tensor]:  # ids [n, top_k] and weights [n, top_k], by rank
        logits = self.router(x)
        every = {abi.SOFTMAX: logits.softmax(-1), abi.SIGMOID: logits.sigmoid(), abi.SOFTMAX_OF_CHOSEN: logits}
        scores = every[self.score]
        choices = scores if self.correction is None else scores + self.correction.double()
        grouped = choices.view(len(x), self.groups, -1)
        worth = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(worth).scatter(1, worth.topk(self.kept_groups, dim=-1).indices, 1.0).bool()
        choices = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        ids = (-choices).argsort(dim=-1, stable=True)[:, : self.top_k]
        weights = scores.gather(1, ids)
        if self.score == abi.SOFTMAX_OF_CHOSEN:
            weights = weights.softmax(-1)
        elif self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights * self.scale

    def __call__(self, x: Tensor, shared: MLP | None) -> Tensor:
        total = torch.zeros_like(x)
        for row, (ids, weights) in enumerate(zip(*self.route(x), strict=True)):
            for expert, weight in zip(ids.tolist(), weights, strict=True):
                total[row] += weight * self.experts[expert](x[row])
        if shared is None:
            return total
        scale = 1.0 if self.shared_gate is None else self.shared_gate(x).sigmoid()
        return total + scale * shared(x)


@dataclass(frozen=True, kw_only=True)
class Layer:
    hidden: int
    heads: tuple[int, int, int]  # of queries, of keys, and dimensions
    qkv: Linear
    output: Linear
    mlp: MLP | None  # or the shared expert
    experts: Mixture | None = None
    input_norm: Norm = NO_NORM
    attention_norm: Norm = NO_NORM
    mlp_norm: Norm = NO_NORM
    mlp_output_norm: Norm = NO_NORM
    query_norm: Norm = NO_NORM
    key_norm: Norm = NO_NORM
    norm_whole: bool = False
    rotation: tuple[Tensor, Tensor] | None = None  # cos and sin [max_positions, head_dim / 2]
    sinks: Tensor | None = None  # [num_heads]
    scale: float = 0.0
    softcap: float = 0.0
    window: int = 0
    held: list[object] = field(default_factory=list)  # what structures point into

    @classmethod
    def random(cls, hidden: int, heads: tuple[int, int, int], mlp: MLP | None, seed: int, **changes: object) -> Layer:
        num_heads, num_kv_heads, head_dim = heads
        qkv = Linear.random((num_heads + 2 * num_kv_heads) * head_dim, hidden, seed, bias=True, scale=2)
        output = Linear.random(hidden, num_heads * head_dim, seed + 2)
        return cls(hidden=hidden, heads=heads, qkv=qkv, output=output, mlp=mlp, **changes)  # type: ignore[arg-type]

    def struct(self, native: Native, dtype: torch.dtype, pool: Sequence[Tensor] = ()) -> abi.PgLayer:
        names = ("input_norm", "attention_norm", "mlp_norm", "mlp_output_norm", "query_norm", "key_norm")
        packed = {"qkv": self.qkv.pack(native, dtype), "output": self.output.pack(native, dtype)}
        if self.mlp is not None:
            packed["gate_up"] = self.mlp.first.pack(native, dtype, by_turns=self.mlp.gated)
            packed["down"] = self.mlp.second.pack(native, dtype)
        experts = None if self.experts is None else self.experts.struct(native, dtype)
        self.held.append((packed, experts))
        kind = self.mlp if self.experts is None else self.experts.experts[0]
        assert kind is not None
        given = {"sinks": self.sinks} | dict(zip(("cos", "sin"), self.rotation or (None, None), strict=True))
        return abi.PgLayer(
            **dict(zip(("num_heads", "num_kv_heads", "head_dim"), self.heads, strict=True)),
            norm_whole=self.norm_whole,
            **{name: getattr(self, name).struct for name in names},
            **{name: linear.struct for name, linear in packed.items()},
            **{name: None if tensor is None else tensor.data_ptr() for name, tensor in given.items()},
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
            inner=0 if self.mlp is None else self.mlp.inner,
            gated=kind.gated,
            activation=kind.activation,
            experts=None if experts is None else ctypes.pointer(experts),
            **{name: tensor.data_ptr() for name, tensor in zip(("keys", "values"), pool, strict=False)},
        )

    def attend(
        self,
        x: Tensor,  # [n, hidden] float64, at positions 0 ... n - 1
    ) -> Tensor:  # [n, num_heads * head_dim]
        num_heads, num_kv_heads, head_dim = self.heads
        share = num_heads // num_kv_heads
        widths = [count * head_dim for count in (num_heads, num_kv_heads, num_kv_heads)]
        query, key, value = torch.split(self.qkv(x), widths, dim=-1)
        if self.norm_whole:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (one.view(len(x), -1, head_dim) for one in (query, key, value))
        if not self.norm_whole:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = self._rotated(query), self._rotated(key)
        key, value = (one.repeat_interleave(share, dim=1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * (self.scale or head_dim**-0.5)
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        places = torch.arange(len(x))
        behind = places[:, None] - places
        hidden = (behind < 0) | (behind >= self.window) if self.window else behind < 0
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, len(x), 1)
            probabilities = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", probabilities, value).flatten(1)

    def _rotated(self, x: Tensor) -> Tensor:
        if self.rotation is None:
            return x
        cos, sin = (table[: len(x), None].double() for table in self.rotation)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def __call__(self, x: Tensor, residual_scale: float) -> Tensor:
        attended = self.output(self.attend(self.input_norm(x)))
        x = x + residual_scale * self.attention_norm(attended)
        return x + residual_scale * self.mlp_output_norm(self.feed_forward(self.mlp_norm(x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        if self.experts is not None:
            return self.experts(x, self.mlp)
        assert self.mlp is not None
        return self.mlp(x)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    layers: list[Layer]
    head: Linear  # [vocab, hidden]
    embedding: Tensor | None = None  # [vocab, hidden]; None: the head's
    norm: Norm = NO_NORM
    positions: Tensor | None = None  # [max_positions, hidden]
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    def hidden(
        self,
        token_ids: Tensor,  # [n]
    ) -> Tensor:  # [n, hidden] float64
        x = (self.head.weight if self.embedding is None else self.embedding)[token_ids].double() * self.embed_scale
        if self.positions is not None:
            x = x + self.positions[: len(x)].double()
        for layer in self.layers:
            x = layer(x, self.residual_scale)
        return self.norm(x)

    def logits(
        self,
        hidden: Tensor,  # [n, hidden] float64
    ) -> Tensor:  # [n, vocab] float64
        logits = self.head(hidden) * self.logit_scale
        return self.logit_softcap * torch.tanh(logits / self.logit_softcap) if self.logit_softcap else logits


class Running:
    """A decoder in the native kernels, with a pool of blocks for some sequences."""

    def __init__(
        self,
        native: Native,
        decoder: Decoder,
        sequences: Sequence[Tensor],  # of token ids [n]
        *,
        weights: torch.dtype = torch.float32,
        kv: torch.dtype = torch.float32,
        rounds: bool = False,
        room: int = 0,  # for further tokens of each
    ) -> None:
        self._native, self.sequences = native, sequences
        first = decoder.layers[0]
        longest = max(map(len, sequences)) + room
        num_blocks = -(-longest // BLOCK_SIZE)
        order = torch.randperm(len(sequences) * num_blocks, generator=torch.Generator().manual_seed(5))
        self.tables = order.view(len(sequences), num_blocks).numpy()
        self.tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
        for row, sequence in zip(self.tokens, sequences, strict=True):
            row[: len(sequence)] = sequence
        shapes = [KVShape(kv, BLOCK_SIZE, *layer.heads[1:]) for layer in decoder.layers]
        sizes = [(native.key_bytes(shape), native.value_bytes(shape)) for shape in shapes]
        pools = [[torch.zeros(len(order), size, dtype=torch.uint8) for size in both] for both in sizes]
        structs = [layer.struct(native, weights, pool) for layer, pool in zip(decoder.layers, pools, strict=True)]
        head = decoder.head.pack(native, weights)
        self._held = (decoder, pools, head)
        given = {"embedding": decoder.embedding, "positions": decoder.positions}
        self.model = abi.PgModel(
            num_layers=len(structs),
            hidden=first.hidden,
            vocab=head.n,
            block_size=BLOCK_SIZE,
            kv_format=FORMATS[kv],
            round_activations=rounds,
            max_positions=longest,
            eps=EPS,
            embed_scale=decoder.embed_scale,
            residual_scale=decoder.residual_scale,
            logit_scale=decoder.logit_scale,
            logit_softcap=decoder.logit_softcap,
            norm=decoder.norm.struct,
            head=head.struct,
            **{name: None if tensor is None else tensor.data_ptr() for name, tensor in given.items()},
            layers=(abi.PgLayer * len(structs))(*structs),
        )
        assert native.why_unsupported(self.model) == ""
        self._columns = StepColumns(self.tokens, self.tables)

    def step(self, scheduled: Mapping[int, tuple[int, int]], wanted: int = 0) -> abi.PgStep:
        """Of each sequence, the tokens from one position to another; all, or the last `wanted`, give a hidden state."""
        begins, ends = np.array(list(scheduled.values())).T
        counts = ends - begins
        return self._columns.fill(np.array(list(scheduled)), begins, counts, np.minimum(wanted or counts, counts))

    def forward(self, scheduled: Mapping[int, tuple[int, int]]) -> list[Tensor]:
        """The hidden states [n, hidden] of each."""
        counts = [end - begin for begin, end in scheduled.values()]
        hidden = torch.empty(sum(counts), self.model.hidden)
        self._native.forward(self.model, self.step(scheduled), hidden)
        return list(torch.split(hidden, counts))

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.empty(len(hidden), self.model.vocab)
        self._native.logits(self.model, hidden, logits)
        return logits

    def greedy(self, hidden: Tensor) -> Tensor:
        return self._native.greedy(self.model, hidden)

    def extend(self, scheduled: Mapping[int, tuple[int, int]], count: int) -> Ints:  # [count, num_seqs]
        zeros = np.zeros(len(scheduled))
        step = self.step(scheduled, 1)
        return self._native.extend(self.model, step, count, zeros.astype(np.float32), zeros.astype(np.int64))


def rope(
    head_dim: int, base: float, max_positions: int = 1024
) -> tuple[Tensor, Tensor]:  # [max_positions, head_dim / 2]
    angles = torch.arange(max_positions)[:, None] * base ** (-torch.arange(0, head_dim, 2) / head_dim)
    return angles.cos(), angles.sin()
