"""From checkpoint tensors to the torch decoder: projections of the same input are joined, and packed for their op."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.description.names import LayerParts, Part, Parts
from engine.description.spec import NO_ROPE, AttentionSpec, DeltaNetSpec, ExpertsSpec, LatentSpec, LayerSpec, ModelSpec
from engine.description.tensors import PER_HEAD_SLOTS
from engine.modeling.kv_pool import KVLayout
from engine.modeling.rope import build_rope_table
from engine.modeling.torch_decoder.decoder import Decoder
from engine.modeling.torch_decoder.embedding import Embed, HeadRows, StoredRows
from engine.modeling.torch_decoder.latent import LatentWeights
from engine.modeling.torch_decoder.layer_weights import (
    AttentionWeights,
    DecoderLayer,
    DenseWeights,
    MixtureWeights,
    NormWeight,
)
from engine.modeling.torch_decoder.linear_attention import DeltaWeights
from engine.modeling.torch_decoder.projection import Projection
from engine.weights.formats import Formats
from engine.weights.kv_scales import KVScales
from engine.weights.quantised.kept import gpu_form
from engine.weights.source import WeightSource, decoded_codes, kept_codes
from kernels.interface import Kernels
from kernels.ops.attention.rotary_store import HeadNorm
from kernels.ops.experts.experts import ExpertWeights, Routing
from kernels.ops.linears import linear_codes, linear_fp8
from kernels.ops.linears.codes import INT4, Codes, joined
from kernels.ops.linears.linear import LinearWeight

Pack = Callable[[Tensor], LinearWeight]


def build_decoder(
    spec: ModelSpec,
    source: WeightSource,
    formats: Formats,
    kernels: Kernels,
    device: torch.device,
    *,
    max_positions: int,
) -> Decoder:
    """A decoder for sequences of up to `max_positions` tokens.

    Torch multiplies fastest in the format that it computes in, so weights are held in that, but for quantised ones.
    """
    return decoder_of(DecoderReader(spec, source, formats, kernels, device), max_positions=max_positions)


def decoder_of(reader: DecoderReader, *, max_positions: int) -> Decoder:
    """The same of what a reader makes of its checkpoint."""
    spec, source, device = reader.spec, reader.source, reader.device
    tensors = source.tensors
    embedding = reader.matrix((tensors.embedding,))
    head = reader.head(embedding)
    positions = None if tensors.positions is None else reader.matrix((tensors.positions,))
    norm = reader.norm("norm", tensors.norm)
    assert norm is not None
    source.release()
    return Decoder(
        spec=spec,
        kernels=reader.kernels,
        embed=reader.embed(embedding, head),
        positions=positions,
        layers=reader.layers(),
        norm=norm,
        head=head,
        ropes={
            (index, dims): build_rope_table(
                None if index == NO_ROPE else spec.ropes[index], dims, max_positions, dtype=reader.dtype, device=device
            )
            for index, dims in {heads.rotation for heads in spec.attentions}
        },
        layout=torch_layout(spec, reader.formats, device, source.kv_scales()),
    )


def torch_layout(
    spec: ModelSpec, formats: Formats, device: torch.device, scales: tuple[KVScales, ...] = ()
) -> KVLayout:
    on_device = tuple(KVScales(*(column.to(device) for column in layer)) for layer in scales)
    return KVLayout(spec.attentions, formats.kv, device, on_device)


class DecoderReader:
    """Takes tensors of one checkpoint and converts them."""

    def __init__(
        self, spec: ModelSpec, source: WeightSource, formats: Formats, kernels: Kernels, device: torch.device
    ) -> None:
        exact = device.type == "cpu" and formats.compute != torch.float16
        self.dtype = torch.float32 if exact else formats.compute
        self._held = self.dtype if formats.quantised else formats.weights
        self._keeps_codes = formats.keeps_codes and kernels.pack_decoded is None
        self._narrow = formats.weights if formats.quantised else None
        self.spec = spec
        self.source = source
        self.formats = formats
        self.kernels = kernels
        self.device = device

    def embed(self, embedding: Tensor, head: LinearWeight) -> Embed:
        """By `embedding`, or by the rows of the quantised head that is made of it."""
        is_head = self.source.tensors.head is None and self.formats.quantised_head
        return HeadRows(head, self.dtype) if is_head else StoredRows(embedding)

    def layers(self) -> list[DecoderLayer]:
        return [self.layer(*both) for both in zip(self.spec.layers, self.source.tensors.layers, strict=True)]

    def matrix(self, parts: Parts) -> Tensor:
        """Matrices below each other, rounded to the format that weights are held in, in the one that computes.

        On a CPU each is copied once to its place.
        """
        return self._together(parts, self._held)

    def vector(self, parts: Parts) -> Tensor:
        """Vectors behind each other, in the format that computes."""
        return self._together(parts, self.dtype)

    def _together(self, parts: Parts, rounded: torch.dtype) -> Tensor:
        if self.device.type != "cpu":
            pieces = [self._on_device(part, rounded).to(self.dtype) for part in parts]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        sizes = [part.wanted[0] for part in parts]
        joined = torch.empty((sum(sizes), *parts[0].wanted[1:]), dtype=self.dtype)
        for part, piece in zip(parts, torch.split(joined, sizes), strict=True):
            self.source.copied(part, piece, rounded=rounded)
        return joined

    def norm(self, slot: str, parts: LayerParts) -> NormWeight | None:
        if slot not in parts:
            return None
        bias = parts.get(f"{slot}.bias")
        return NormWeight(self.vector(parts[slot]), None if bias is None else self.vector(bias))

    def layer(self, described: LayerSpec, parts: LayerParts) -> DecoderLayer:
        mlp = described.mlp
        layer = DecoderLayer(
            mixer=self._mixer(described.attention, parts),
            input_norm=self.norm("input_norm", parts),
            qkv=self.projection("qkv", parts),
            output=self.projection("output", parts),
            attention_norm=self.norm("attention_norm", parts),
            mlp_norm=self.norm("mlp_norm", parts),
            activation=mlp.activation,
            gated=mlp.gated,
            dense=DenseWeights(*(self.projection(slot, parts) for slot in ("gate_up", "down"))) if mlp.inner else None,
            mixture=None if mlp.experts is None else self._mixture(mlp.experts, parts, gated=mlp.gated),
            mlp_output_norm=self.norm("mlp_output_norm", parts),
            scale=self.vector(parts["scale"]) if described.scaled else None,
        )
        self.source.release()
        return layer

    def _mixer(self, described: AttentionSpec | DeltaNetSpec, parts: LayerParts) -> AttentionWeights | DeltaWeights:
        if isinstance(described, DeltaNetSpec):
            return self._delta(described, parts)
        ones = torch.ones(described.head_dim, dtype=self.dtype, device=self.device) if described.value_norm else None
        return AttentionWeights(
            heads=described,
            head_norm=None if described.latent else self._head_norm(parts),
            value_norm=ones,
            latent=self._latent(described.latent, parts) if described.latent else None,
            sinks=self.vector(parts["sinks"]).float() if "sinks" in parts else None,
        )

    def _delta(self, described: DeltaNetSpec, parts: LayerParts) -> DeltaWeights:
        return DeltaWeights(
            described=described,
            gates=self.projection("delta.gates", parts, self.kernels.pack_exact).weight,
            taps=self.matrix(parts["delta.taps"]).squeeze(1).t().contiguous(),
            rate=self.vector(parts["delta.rate"]).float().exp(),
            step=self.vector(parts["delta.step"]).float(),
            norm=self.vector(parts["delta.norm"]),
            eps=self.spec.norm.eps,
        )

    def _head_norm(self, parts: LayerParts) -> HeadNorm | None:
        if "query_norm" not in parts:
            return None
        query, key = (self.vector(parts[slot]) for slot in ("query_norm", "key_norm"))
        return HeadNorm(query, key, self.spec.norm.eps)

    def _latent(self, latent: LatentSpec, parts: LayerParts) -> LatentWeights:
        key_up, value_up = (
            self.kernels.pack_heads([self.matrix((part,)) for part in parts[slot]]) for slot in PER_HEAD_SLOTS
        )
        return LatentWeights(
            shape=latent,
            query_norm=self.vector(parts["query_norm"]) if latent.query_rank else None,
            query_up=self.projection("query_up", parts) if latent.query_rank else None,
            key_norm=self.vector(parts["key_norm"]),
            key_up=key_up,
            value_up=value_up,
        )

    def projection(self, slot: str, parts: LayerParts, pack: Pack | None = None) -> Projection:
        """Projections of the same input as one: [sum of out_features, in_features]."""
        bias = parts.get(f"{slot}.bias")
        weight = self._weight(parts[slot]) if pack is None else pack(self.matrix(parts[slot]))
        return Projection(weight, None if bias is None else self.vector(bias))

    def _weight(self, parts: Parts) -> LinearWeight:
        return self._kept(parts) or self._decoded(parts) or self.kernels.pack_linear(self.matrix(parts))

    def _kept(self, parts: Parts) -> LinearWeight | None:
        """As the codes that the checkpoint has; None: they are to be dequantised."""
        codes = kept_codes(self.source, parts) if self._keeps_codes else None
        return None if codes is None else linear_codes.pack_codes(joined(codes).to(self.device))

    def _decoded(self, parts: Parts) -> LinearWeight | None:
        """As codes that become numbers while they are multiplied, or E4M3 that meets E4M3; None: they are to be
        dequantised, and where weights are quantised that again."""
        pack = self._pack_codes()
        if pack is None:
            return None
        try:
            return pack(self._codes_of(parts))
        except ValueError:  # of another kind, or parts that cannot be joined
            return None

    def _codes_of(self, parts: Parts) -> Codes:
        """To be decoded, as one matrix.  Raises ValueError where they are to be dequantised."""
        codes = decoded_codes(self.source, parts)
        if codes is None or (self._narrow == INT4 and codes[0].bits != 4):
            raise ValueError(f"{parts[0].name} is not to be decoded")
        return joined(codes).to(self.device)

    def _pack_codes(self) -> Callable[[Codes], LinearWeight] | None:
        if self._narrow == linear_fp8.FP8:
            return linear_fp8.pack_codes
        return self.kernels.pack_decoded if self._narrow in (None, INT4) else None

    def head(self, embedding: Tensor) -> LinearWeight:
        part = self.source.tensors.head
        if part is None:
            return self.kernels.pack_output(embedding)
        return self._kept((part,)) or self._decoded((part,)) or self.kernels.pack_output(self.matrix((part,)))

    def _mixture(self, experts: ExpertsSpec, parts: LayerParts, *, gated: bool) -> MixtureWeights:
        exact = self.kernels.pack_exact
        return MixtureWeights(
            routing=Routing(
                score=experts.score,
                top_k=experts.top_k,
                renormalise=experts.renormalise,
                groups=experts.groups,
                kept_groups=experts.kept_groups,
                group_best=experts.group_best,
                scale=experts.scale,
            ),
            router=self.projection("router", parts, exact),
            correction=self.vector(parts["correction"]).float() if experts.correction else None,
            gate_up=self._experts("experts_gate_up", parts, experts.count),
            down=self._experts("experts_down", parts, experts.count),
            shared_gate=self.projection("shared_gate", parts, exact) if experts.shared_gate else None,
        )

    def _experts(self, slot: str, parts: LayerParts, count: int) -> ExpertWeights:
        by_expert, bias = _by_expert(parts[slot], count), parts.get(f"{slot}.bias")
        own = None if bias is None else torch.stack([self.vector(one) for one in _by_expert(bias, count)])
        if self._keeps_codes:  # then experts are multiplied one by one
            return ExpertWeights(tuple(map(self._weight, by_expert)), own)
        decoded = self._decoded_experts(by_expert, own)
        return decoded or self.kernels.pack_experts([self.matrix(one) for one in by_expert], own)

    def _decoded_experts(self, by_expert: list[Parts], bias: Tensor | None) -> ExpertWeights | None:
        """As codes that become numbers while they are multiplied, one expert read after the other; None: they are to be
        dequantised.  Where linears meet activations in E4M3 experts' activations stay in 16 bits."""
        pack = self.kernels.pack_experts_decoded if self._narrow in (None, INT4, linear_fp8.FP8) else None
        if pack is None or gpu_form(by_expert, self.source.quantised_as) is None:
            return None
        try:
            return pack(map(self._codes_of, by_expert), bias)
        except ValueError:  # of another kind, in another order, or not all alike
            return None

    def _on_device(self, part: Part, dtype: torch.dtype) -> Tensor:
        taken = self.source.take(part)  # kernels read rows, which one that was turned has not in memory
        return taken.to(device=self.device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def _by_expert(parts: Parts, count: int) -> list[Parts]:
    each = len(parts) // count
    return [parts[index * each : (index + 1) * each] for index in range(count)]
