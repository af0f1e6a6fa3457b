"""A described layer's weights as the native library reads them: packed one after the other, straight from a checkpoint.

The structures point into tensors, which the objects here keep alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.description.names import LayerParts, Parts
from engine.description.spec import AttentionSpec, DeltaNetSpec, ExpertsSpec, LatentSpec, LayerSpec, ModelSpec
from engine.description.tensors import PER_HEAD_SLOTS
from engine.modeling.native.delta import NativeDelta, describe_delta
from engine.weights.formats import Formats
from engine.weights.pages import Arena, padded
from engine.weights.quantised.kept import EXACT_SLOTS, common_form, decoded_bytes, decoded_form, slots_of
from engine.weights.source import WeightSource, decoded_codes, kept_codes
from kernels.cpu.binding import abi
from kernels.cpu.binding.coded import DECODED, coding_of
from kernels.cpu.binding.native import Native
from kernels.cpu.binding.packing import PackedLinear, codes_format
from kernels.ops.linears.codes import UINT4
from shared.errors import ModelError

NORM_KINDS = {"rms": 0, "layer": 1}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}  # PgActivation
SCORES = {"softmax": 0, "softmax_of_chosen": 1, "sigmoid": 2}  # PgScore


@dataclass(frozen=True, slots=True)
class NativeNorm:
    weight: Tensor  # [size] float32
    bias: Tensor | None  # [size] float32
    kind: str

    @property
    def struct(self) -> abi.PgNorm:
        return abi.PgNorm(self.weight.data_ptr(), address(self.bias), NORM_KINDS[self.kind])


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """A mixture's weights, and the arrays of structures that point at them."""

    router: PackedLinear  # [count, hidden_size]
    correction: Tensor | None  # [count] float32
    gate_up: list[PackedLinear]  # of each expert that is here [2 * inner or inner, hidden_size]
    down: list[PackedLinear]  # of each of these [hidden_size, inner]
    shared_gate: PackedLinear | None  # [1, hidden_size]
    places: Sequence[int]  # of the experts of `gate_up` and `down` among all: a rank of a group may have some of them
    # [count] a bit for each rank that has the expert whole, which moves of experts change; None: none has
    holders: NDArray[np.uint64] | None
    loads: NDArray[np.int64]  # [count] rows that went to each expert, which steps add up where ranks have whole ones
    _arrays: list[ctypes.Array[abi.PgLinear]] = field(default_factory=list)

    @property
    def packings(self) -> set[tuple[object, ...]]:
        """How this process's experts are packed: one can take another one's place where there is a single way."""
        return {(_packing(first), _packing(down)) for first, down in zip(self.gate_up, self.down, strict=True)}

    def fill(self, struct: abi.PgExperts) -> None:
        self._arrays[:] = [(abi.PgLinear * struct.count)() for _ in range(2)]
        for array, linears in zip(self._arrays, (self.gate_up, self.down), strict=True):
            for place, linear in zip(self.places, linears, strict=True):
                array[place] = linear.struct
        struct.router, struct.correction = self.router.struct, address(self.correction)
        struct.gate_up, struct.down = self._arrays
        if self.holders is not None:
            struct.holders, struct.loads = self.holders.ctypes.data, self.loads.ctypes.data
        if self.shared_gate is not None:
            struct.shared_gate = self.shared_gate.struct


@dataclass(frozen=True, slots=True)
class NativeLatent:
    """The linears of latent attention beside the layer's own, and the arrays of structures that point at them."""

    query: PackedLinear | None  # [num_heads * (plain + rotated), query_rank]
    key_up: list[PackedLinear]  # of each head [rank, plain]
    value_up: list[PackedLinear]  # of each head [value_dim, rank]
    _arrays: list[ctypes.Array[abi.PgLinear]] = field(default_factory=list)

    def fill(self, struct: abi.PgLatent) -> None:
        self._arrays[:] = [
            (abi.PgLinear * len(linears))(*(one.struct for one in linears)) for linears in (self.key_up, self.value_up)
        ]
        struct.key_up, struct.value_up = self._arrays
        if self.query is not None:
            struct.query = self.query.struct


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer's weights, packed; a slot that the layer does not have is absent."""

    described: LayerSpec
    norms: dict[str, NativeNorm]  # by slot
    linears: dict[str, PackedLinear]  # by slot: qkv, output, gate_up, down (the shared expert's beside a mixture)
    experts: NativeExperts | None
    latent: NativeLatent | None
    sinks: Tensor | None  # [num_heads] float32
    scale: Tensor | None  # [1] float32
    rotation: tuple[Tensor, Tensor] | None  # cos and sin, each [max_positions, rotated dimensions / 2] float32
    delta: NativeDelta | None  # of linear attention

    def struct(self, memory: tuple[Tensor, Tensor], held: list[object]) -> abi.PgLayer:
        """What the structure points at beside tensors goes to `held`."""
        layer = describe_layer(self.described, held)
        for slot, norm in self.norms.items():
            setattr(layer, slot, norm.struct)
        for slot, linear in self.linears.items():
            setattr(layer, slot, linear.struct)
        if self.experts is not None:
            self.experts.fill(layer.experts.contents)
        if self.latent is not None:
            self.latent.fill(layer.latent.contents)
        if self.rotation is not None:
            layer.cos, layer.sin = (table.data_ptr() for table in self.rotation)
        layer.sinks, layer.layer_scale = address(self.sinks), address(self.scale)
        first, second = (tensor.data_ptr() for tensor in memory)
        if self.delta is None:
            layer.keys, layer.values = first, second
        else:
            self.delta.fill(layer.delta.contents, first, second)
        return layer


def describe_layer(layer: LayerSpec, held: list[object]) -> abi.PgLayer:
    """The dimensions, without any memory but that of the structures that this one points at, which go to `held`."""
    heads, mlp = layer.attention, layer.mlp
    described = abi.PgLayer(inner=mlp.inner, gated=mlp.gated, activation=ACTIVATIONS[mlp.activation])
    if isinstance(heads, DeltaNetSpec):
        delta = describe_delta(heads)
        held.append(delta)
        described.delta = ctypes.pointer(delta)
    else:
        _describe_heads(described, heads, held)
    if mlp.experts is not None:
        experts = describe_experts(mlp.experts)
        held.append(experts)
        described.experts = ctypes.pointer(experts)
    return described


def _describe_heads(layer: abi.PgLayer, heads: AttentionSpec, held: list[object]) -> None:
    layer.num_heads, layer.num_kv_heads, layer.head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
    layer.norm_whole, layer.attention_gate = heads.qk_norm == "whole", heads.gated
    layer.scale, layer.softcap, layer.window = heads.scale, heads.softcap, heads.window
    if heads.latent is not None:
        latent = describe_latent(heads.latent)
        held.append(latent)
        layer.latent = ctypes.pointer(latent)


def describe_latent(latent: LatentSpec) -> abi.PgLatent:
    """The dimensions, without any memory."""
    return abi.PgLatent(
        rank=latent.rank,
        rotated=latent.rotated,
        plain=latent.plain,
        value_dim=latent.value_dim,
        query_rank=latent.query_rank,
        eps=latent.norm_eps,
    )


def describe_experts(experts: ExpertsSpec) -> abi.PgExperts:
    """The dimensions, without any memory."""
    return abi.PgExperts(
        count=experts.count,
        top_k=experts.top_k,
        inner=experts.inner,
        score=SCORES[experts.score],
        renormalise=experts.renormalise,
        groups=experts.groups,
        kept_groups=experts.kept_groups,
        group_best=experts.group_best,
        scale=experts.scale,
    )


class LayerPacker:
    """Takes tensors of one checkpoint and packs them, one after the other, into one arena."""

    def __init__(self, spec: ModelSpec, source: WeightSource, formats: Formats, native: Native) -> None:
        self._spec = spec
        self._source = source
        self._dtype, self._head_dtype, self._group = formats.weights, formats.held_head, formats.group
        self._keeps_codes = formats.keeps_codes
        self._exact = torch.bfloat16 if formats.weights == torch.bfloat16 else torch.float32  # never quantised
        self._native = native
        self._arena = Arena(self._total())

    def head(self, parts: Parts) -> PackedLinear:
        """A head that is the embedding too is no codes, whose rows would be read in their order."""
        own = self._source.tensors.head is not None
        head = (own and self._kept(parts, None, self._head_dtype)) or self.linear(parts, None, self._head_dtype)
        self._source.release()
        return head

    def layer(self, described: LayerSpec, parts: LayerParts, rotation: tuple[Tensor, Tensor] | None) -> NativeLayer:
        mlp, linears = described.mlp, {slot: self._slot(slot, parts) for slot in ("qkv", "output")}
        if mlp.inner:
            linears["gate_up"] = self._slot("gate_up", parts, by_turns=mlp.gated)
            linears["down"] = self._slot("down", parts)
        layer = NativeLayer(
            described=described,
            norms=self._norms(described, parts),
            linears=linears,
            experts=None if mlp.experts is None else self._experts(mlp.experts, parts, gated=mlp.gated),
            latent=self._latent(parts) if PER_HEAD_SLOTS[0] in parts else None,
            sinks=self.vector(parts["sinks"]) if "sinks" in parts else None,
            scale=self.vector(parts["scale"]) if described.scaled else None,
            rotation=rotation,
            delta=self._delta(described.attention, parts) if isinstance(described.attention, DeltaNetSpec) else None,
        )
        self._source.release()
        return layer

    def _delta(self, described: DeltaNetSpec, parts: LayerParts) -> NativeDelta:
        taps = self._source.take(parts["delta.taps"][0]).to(torch.float32)
        return NativeDelta(
            described=described,
            gates=self.linear(parts["delta.gates"], None, self._exact),
            taps=taps.squeeze(1).t().contiguous(),
            rate=self.vector(parts["delta.rate"]).exp(),
            step=self.vector(parts["delta.step"]),
            norm=self.vector(parts["delta.norm"]),
        )

    def final_norm(self, parts: LayerParts) -> NativeNorm:
        norm = self._norm("norm", parts)
        self._source.release()
        return norm

    def linear(self, parts: Parts, bias: Parts | None = None, dtype: torch.dtype | None = None) -> PackedLinear:
        """Parts below each other as one weight [n, k]."""
        dtype = dtype or self._dtype
        taken = [self._source.take(part) for part in parts]
        packed = self._take(sum(map(len, taken)), taken[0].shape[1], dtype)
        own, sums = None if bias is None else self.vector(bias), self._source.sums(*parts)
        return self._native.pack_linear(taken, dtype, packed, own, group=self._group, sums=sums)

    def vector(self, parts: Parts) -> Tensor:
        return torch.cat([self._source.take(part).to(torch.float32, copy=True) for part in parts])

    def _slot(self, slot: str, parts: LayerParts, *, by_turns: bool = False) -> PackedLinear:
        return self._weight(parts[slot], parts.get(f"{slot}.bias"), by_turns=by_turns)

    def _weight(self, parts: Parts, bias: Parts | None, *, by_turns: bool = False) -> PackedLinear:
        """`by_turns`: gate and up, as `Native.pack_gate_up` has them; else parts below each other."""
        if (kept := self._kept(parts, bias, self._dtype, by_turns=by_turns)) is not None:
            return kept
        if not by_turns:
            return self.linear(parts, bias)
        gate, up = (self._source.take(part) for part in parts)
        packed = self._take(2 * len(gate), gate.shape[1], self._dtype)
        both = None if bias is None else self.vector(bias).view(2, -1)
        sums = self._source.sums(*parts)
        return self._native.pack_gate_up(gate, up, self._dtype, packed, both, group=self._group, sums=sums)

    def _kept(
        self, parts: Parts, bias: Parts | None, dtype: torch.dtype, *, by_turns: bool = False
    ) -> PackedLinear | None:
        """As the codes that the checkpoint has: multiplied so, or decoded to `dtype` while they are multiplied.

        None: they are to be dequantised.
        """
        own = None if bias is None else self.vector(bias)
        if own is not None and by_turns:
            own = own.view(2, -1)
        codes = kept_codes(self._source, parts) if self._keeps_codes else None
        if codes is not None:
            n, k = sum(part.shape[0] for part in codes), codes[0].shape[1]
            packed = self._arena.take(self._native.packed_bytes(n, k, codes_format(codes), codes[0].group))
            return self._native.pack_codes(codes, packed, own, by_turns=by_turns)
        codes = decoded_codes(self._source, parts) if dtype in DECODED else None
        if codes is None:
            return None
        n, k = sum(part.shape[0] for part in codes), codes[0].shape[1]
        packed = self._arena.take(self._native.coded_bytes(n, k, coding_of(codes), codes[0].group))
        try:
            return self._native.pack_coded(codes, dtype, packed, own, by_turns=by_turns)
        except ValueError as error:
            raise ModelError(f"tensor {parts[0].name}: {error}") from error

    def _take(self, n: int, k: int, dtype: torch.dtype) -> Tensor:
        return self._arena.take(self._native.packed_bytes(n, k, dtype, self._group))

    def _norms(self, described: LayerSpec, parts: LayerParts) -> dict[str, NativeNorm]:
        norms = {slot: self._norm(slot, parts) for slot in parts if slot.endswith("_norm")}
        if isinstance(described.attention, AttentionSpec) and described.attention.value_norm:
            norms["value_norm"] = NativeNorm(torch.ones(described.attention.head_dim), None, "rms")
        return norms

    def _norm(self, slot: str, parts: LayerParts) -> NativeNorm:
        bias = parts.get(f"{slot}.bias")
        kind = "rms" if slot in ("query_norm", "key_norm") else self._spec.norm.kind
        return NativeNorm(self.vector(parts[slot]), None if bias is None else self.vector(bias), kind)

    def _experts(self, experts: ExpertsSpec, parts: LayerParts, *, gated: bool) -> NativeExperts:
        firsts, downs = (
            _by_expert(parts[slot], parts.get(f"{slot}.bias"), experts.num_held)
            for slot in ("experts_gate_up", "experts_down")
        )
        return NativeExperts(
            router=self.linear(parts["router"], parts.get("router.bias"), self._exact),
            correction=self.vector(parts["correction"]) if experts.correction else None,
            gate_up=[self._weight(*both, by_turns=gated) for both in firsts],
            down=[self._weight(*both) for both in downs],
            shared_gate=self.linear(parts["shared_gate"], None, self._exact) if experts.shared_gate else None,
            places=experts.held or range(experts.count),
            holders=np.array(experts.holders, np.uint64) if experts.holders else None,
            loads=np.zeros(experts.count, np.int64),
        )

    def _latent(self, parts: LayerParts) -> NativeLatent:
        keys, values = ([self.linear((part,), None, self._exact) for part in parts[slot]] for slot in PER_HEAD_SLOTS)
        return NativeLatent(self._slot("query_up", parts) if "query_up" in parts else None, keys, values)

    def _total(self) -> int:
        """Bytes of all packed weights, or more: whether codes can be packed narrowly shows when they are read."""
        tensors = self._source.tensors
        total = 0 if tensors.head is not None else self._bytes((tensors.embedding,), self._head_dtype)
        for parts in slots_of(self._spec, tensors):
            total += self._bytes(parts, self._head_dtype if parts == (tensors.head,) else self._dtype)
        each = (layer[slot] for layer in tensors.layers for slot in EXACT_SLOTS if slot in layer)
        return total + sum(self._bytes((part,), self._exact) for parts in each for part in parts)

    def _bytes(self, parts: Parts, dtype: torch.dtype) -> int:
        rows, columns = sum(part.wanted[0] for part in parts), parts[0].wanted[1]
        kept = common_form(parts, self._source.quantised_as) if self._keeps_codes else None
        sizes = []
        if kept is not None:
            sizes.append(self._native.packed_bytes(rows, columns, torch.int8 if kept.bits == 8 else UINT4, kept.group))
        elif dtype in DECODED and (kept := decoded_form(parts, self._source.quantised_as)) is not None:
            sizes.append(decoded_bytes(parts, kept))
        if kept is None or kept.may_be_sorted:
            sizes.append(self._native.packed_bytes(rows, columns, dtype, self._group))
        return padded(max(sizes))


def _by_expert(parts: Parts, bias: Parts | None, count: int) -> list[tuple[Parts, Parts | None]]:
    each = len(parts) // count
    pieces = [slice(index * each, (index + 1) * each) for index in range(count)]
    return [(parts[piece], None if bias is None else bias[piece]) for piece in pieces]


def _packing(linear: PackedLinear) -> tuple[object, ...]:
    columns = linear.bias is not None, linear.gather is not None
    return linear.packed.nbytes, linear.n, linear.k, str(linear.dtype), linear.group, linear.coding, *columns


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
