"""Random decoders of any kind as structures of the native kernels, and as plain arithmetic in float64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.cpu.binding import abi
from kernels.cpu.binding.native import Native
from kernels.cpu.binding.packing import PackedLinear
from kernels.ops.linears.codes import INT4

EPS = 1e-5
GROUP = 32  # of int4

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
        memory = torch.empty(native.packed_bytes(n, k, dtype, GROUP), dtype=torch.uint8)
        if not by_turns:
            return native.pack_linear(self.weight, dtype, memory, self.bias, group=GROUP)
        bias = None if self.bias is None else self.bias.view(2, -1)
        gate, up = self.weight.chunk(2)
        return native.pack_gate_up(gate, up, dtype, memory, bias, group=GROUP)

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
    group_best: int = 2
    scale: float = 1.0
    correction: Tensor | None = None  # [count]
    shared_gate: Linear | None = None  # [1, hidden]
    held: list[object] = field(default_factory=list)

    def struct(self, native: Native, dtype: torch.dtype) -> abi.PgExperts:
        kept = dtype if dtype not in (torch.int8, INT4) else torch.float32
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
            group_best=self.group_best,
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
        worth = grouped.topk(min(self.group_best, grouped.shape[-1]), dim=-1).values.sum(-1)
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


@dataclass(frozen=True)
class Latent:
    """What latent attention has beside a layer's own linears; `mixed` gives what queries are made of, then latents."""

    rank: int
    rotated: int
    plain: int
    value_dim: int
    query: Linear | None  # [num_heads * (plain + rotated), query_rank]
    key_up: list[Linear]  # [num_heads] of [rank, plain]
    value_up: list[Linear]  # [num_heads] of [value_dim, rank]
    held: list[object] = field(default_factory=list)

    @classmethod
    def random(
        cls, num_heads: int, seed: int, *, rank: int, rotated: int, plain: int, value_dim: int, query_rank: int = 0
    ) -> Latent:
        width = num_heads * (plain + rotated)
        query = Linear.random(width, query_rank, seed, scale=2) if query_rank else None
        heads = range(num_heads)
        key_up = [Linear.random(rank, plain, seed + 2 * head) for head in heads]
        value_up = [Linear.random(value_dim, rank, seed + 100 + 2 * head) for head in heads]
        return cls(rank, rotated, plain, value_dim, query, key_up, value_up)

    def struct(self, native: Native, dtype: torch.dtype) -> abi.PgLatent:
        exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        query = None if self.query is None else self.query.pack(native, dtype)
        heads = [[one.pack(native, exact) for one in linears] for linears in (self.key_up, self.value_up)]
        tables = [(abi.PgLinear * len(packed))(*(one.struct for one in packed)) for packed in heads]
        self.held.append((query, heads, tables))
        return abi.PgLatent(
            **{name: getattr(self, name) for name in ("rank", "rotated", "plain", "value_dim")},
            query_rank=0 if query is None else query.k,
            eps=EPS,
            query=abi.PgLinear() if query is None else query.struct,
            key_up=tables[0],
            value_up=tables[1],
        )

    def heads(
        self,
        layer: Layer,
        mixed: Tensor,  # [n, ...] float64
    ) -> tuple[Tensor, Tensor, Tensor]:  # queries, keys and values [n, num_heads, ...]
        first = mixed.shape[1] - self.rank - self.rotated
        given, latent, turned = mixed.tensor_split((first, first + self.rank), dim=1)
        latent, turned = layer.key_norm(latent), layer.rotated(turned[:, None])
        query = given if self.query is None else self.query(layer.query_norm(given))
        query = query.view(len(mixed), -1, self.plain + self.rotated)
        query = torch.cat((query[..., : self.plain], layer.rotated(query[..., self.plain :])), dim=-1)
        plain = torch.stack([latent @ one.weight.double() for one in self.key_up], dim=1)
        key = torch.cat((plain, turned.expand(-1, len(self.key_up), -1)), dim=-1)
        return query, key, torch.stack([one(latent) for one in self.value_up], dim=1)


@dataclass(frozen=True, kw_only=True)
class Layer:
    hidden: int
    heads: tuple[int, int, int]  # of queries, of keys, and dimensions
    qkv: Linear
    output: Linear
    mlp: MLP | None  # or the shared expert
    experts: Mixture | None = None
    latent: Latent | None = None
    input_norm: Norm = NO_NORM
    attention_norm: Norm = NO_NORM
    mlp_norm: Norm = NO_NORM
    mlp_output_norm: Norm = NO_NORM
    query_norm: Norm = NO_NORM
    key_norm: Norm = NO_NORM
    value_norm: Norm = NO_NORM
    norm_whole: bool = False
    layer_scale: Tensor | None = None  # [1]
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

    @classmethod
    def random_latent(cls, hidden: int, latent: Latent, mlp: MLP, seed: int, **changes: object) -> Layer:
        num_heads = len(latent.key_up)
        first = num_heads * (latent.plain + latent.rotated) if latent.query is None else latent.query.weight.shape[1]
        norms = {"key_norm": Norm.random(latent.rank, seed + 4)}
        if latent.query is not None:
            norms["query_norm"] = Norm.random(first, seed + 6)
        return cls(
            hidden=hidden,
            heads=(num_heads, 1, latent.rank + latent.rotated),
            qkv=Linear.random(first + latent.rank + latent.rotated, hidden, seed, bias=True, scale=2),
            output=Linear.random(hidden, num_heads * latent.value_dim, seed + 2),
            mlp=mlp,
            latent=latent,
            scale=(latent.plain + latent.rotated) ** -0.5,
            **(norms | changes),  # type: ignore[arg-type]
        )

    def struct(self, native: Native, dtype: torch.dtype, pool: Sequence[Tensor] = ()) -> abi.PgLayer:
        names = ("input_norm", "attention_norm", "mlp_norm", "mlp_output_norm", "query_norm", "key_norm", "value_norm")
        packed = {"qkv": self.qkv.pack(native, dtype), "output": self.output.pack(native, dtype)}
        if self.mlp is not None:
            packed["gate_up"] = self.mlp.first.pack(native, dtype, by_turns=self.mlp.gated)
            packed["down"] = self.mlp.second.pack(native, dtype)
        experts = None if self.experts is None else self.experts.struct(native, dtype)
        latent = None if self.latent is None else self.latent.struct(native, dtype)
        self.held.append((packed, experts, latent))
        kind = self.mlp if self.experts is None else self.experts.experts[0]
        assert kind is not None
        cos, sin = self.rotation or (None, None)
        given = {"sinks": self.sinks, "layer_scale": self.layer_scale, "cos": cos, "sin": sin}
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
            latent=None if latent is None else ctypes.pointer(latent),
            **{name: tensor.data_ptr() for name, tensor in zip(("keys", "values"), pool, strict=False)},
        )

    def attend(
        self,
        x: Tensor,  # [n, hidden] float64, at positions 0 ... n - 1
    ) -> Tensor:  # [n, num_heads * features of a value]
        query, key, value = self._grouped(x) if self.latent is None else self.latent.heads(self, self.qkv(x))
        scores = torch.einsum("qhd,khd->hqk", query, key) * (self.scale or self.heads[2] ** -0.5)
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

    def _grouped(
        self,
        x: Tensor,  # [n, hidden] float64
    ) -> tuple[Tensor, Tensor, Tensor]:  # queries, keys and values [n, num_heads, head_dim]
        num_heads, num_kv_heads, head_dim = self.heads
        share = num_heads // num_kv_heads
        widths = [count * head_dim for count in (num_heads, num_kv_heads, num_kv_heads)]
        query, key, value = torch.split(self.qkv(x), widths, dim=-1)
        if self.norm_whole:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (one.view(len(x), -1, head_dim) for one in (query, key, value))
        if not self.norm_whole:
            query, key = self.query_norm(query), self.key_norm(key)
        both = self.rotated(key), self.value_norm(value)
        key, value = (one.repeat_interleave(share, dim=1) for one in both)
        return self.rotated(query), key, value

    def rotated(self, x: Tensor) -> Tensor:
        if self.rotation is None:
            return x
        cos, sin = (table[: len(x), None].double() for table in self.rotation)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def __call__(self, x: Tensor, residual_scale: float) -> Tensor:
        attended = self.output(self.attend(self.input_norm(x)))
        x = x + residual_scale * self.attention_norm(attended)
        x = x + residual_scale * self.mlp_output_norm(self.feed_forward(self.mlp_norm(x)))
        return x if self.layer_scale is None else x * self.layer_scale.double()

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
