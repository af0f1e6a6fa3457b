"""A described decoder in torch: one forward pass for all families, over the kernels of any provider.

A step's tokens of all sequences lie in one tensor, and pass the layers together; only attention knows which token
belongs to which sequence, from its metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.description.spec import AttentionSpec, ModelSpec
from engine.modeling.batch import StepBatch
from engine.modeling.inputs import StepInputs, build_inputs
from engine.modeling.kv_pool import KVLayout, KVPool
from engine.modeling.linear_attention import DeltaStates, DeltaWeights, attend_linearly
from engine.modeling.rope import RopeTable
from kernels.interface import Kernels
from kernels.ops.experts import ExpertWeights, Routing
from kernels.ops.kv_cache import KVCache
from kernels.ops.linear import LinearWeight
from kernels.ops.linear_int8 import read_rows
from kernels.ops.rotary_store import HeadNorm

Rotation = tuple[Tensor, Tensor]  # cosines and sines, each [num_tokens, 1, head_dim]


@dataclass(frozen=True, slots=True)
class Projection:
    weight: LinearWeight  # [out_features, in_features]
    bias: Tensor | None  # [out_features]


@dataclass(frozen=True, slots=True)
class NormWeight:
    weight: Tensor  # [hidden_size]
    bias: Tensor | None  # [hidden_size], of layer norms


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A feed-forward layer's: gate and up together where it is gated, else up alone."""

    gate_up: Projection  # [2 * inner or inner, hidden_size]
    down: Projection  # [hidden_size, inner]


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """A mixture of experts'."""

    routing: Routing
    router: Projection  # [count, hidden_size], never quantised
    correction: Tensor | None  # [count]
    gate_up: ExpertWeights
    down: ExpertWeights
    shared_gate: Projection | None  # [1, hidden_size]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; a norm that the layer does not have is None."""

    mixer: AttentionSpec | DeltaWeights
    input_norm: NormWeight | None
    qkv: Projection  # [(num_heads + 2 num_kv_heads) * head_dim, hidden_size], and where it is gated the gate's rows
    head_norm: HeadNorm | None
    sinks: Tensor | None  # [num_heads] float32
    output: Projection  # [hidden_size, num_heads * head_dim]
    attention_norm: NormWeight | None
    mlp_norm: NormWeight | None
    activation: str
    gated: bool
    dense: DenseWeights | None  # the shared expert where there is a mixture
    mixture: MixtureWeights | None
    mlp_output_norm: NormWeight | None


class Decoder:
    """Weights bound to the kernels that serve them: a `engine.modeling.model.Model`."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        kernels: Kernels,
        embedding: Tensor | None,  # [vocab_size, hidden_size]; None: the rows of the quantised head
        positions: Tensor | None,  # [max_position_embeddings, hidden_size], learned
        layers: Sequence[DecoderLayer],
        norm: NormWeight,
        head: LinearWeight,  # [vocab_size, hidden_size]
        ropes: Sequence[RopeTable],  # of spec.ropes, and as the last, at NO_ROPE, one that turns nothing
        layout: KVLayout,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.layout = layout
        self.windows = tuple(sorted({heads.window for heads in spec.attentions}))
        self._embedding = embedding
        self._positions = positions
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._ropes = tuple(ropes)
        self._used_ropes = {heads.rope for heads in spec.attentions}
        self._next_norms = (*(layer.input_norm for layer in layers[1:]), norm)
        self._memories: list[KVCache | DeltaStates] = []  # one of each layer

    @property
    def device(self) -> torch.device:
        return self._norm.weight.device

    def bytes_per_block(self, block_size: int) -> int:
        return self.layout.bytes_per_block(block_size)

    def allocate(self, num_blocks: int, block_size: int, num_rows: int = 0) -> KVPool:
        caches = self.layout.make_caches(num_blocks, block_size)
        each, dtype = iter(caches), self._norm.weight.dtype
        self._memories = [
            DeltaStates.make(layer.mixer.described, num_rows, dtype, self.device)
            if isinstance(layer.mixer, DeltaWeights)
            else next(each)
            for layer in self._layers
        ]
        return KVPool(num_blocks, block_size, (tensor for cache in caches for tensor in cache.tensors))

    def forward(self, batch: StepBatch) -> Tensor:
        """Final hidden states [sum of wanted, hidden_size]; writes this step's keys and values into the pool."""
        inputs = build_inputs(batch, self.kernels, self.windows, has_states=self.spec.has_states)
        return self.compute(inputs)[inputs.wanted]

    def compute(self, inputs: StepInputs) -> Tensor:
        """Final hidden states of all the step's tokens [num_tokens, hidden_size]; nothing here waits for the device."""
        rotations = {
            index: (self._ropes[index].cos[inputs.positions], self._ropes[index].sin[inputs.positions])
            for index in self._used_ropes
        }
        residual = self._embed(inputs)
        first = self._layers[0].input_norm
        hidden = residual if first is None else self._normed(residual, first)
        for layer, memory, next_norm in zip(self._layers, self._memories, self._next_norms, strict=True):
            attended = self._project(layer.output, self._mix(layer, hidden, rotations, inputs, memory))
            hidden, residual = self._add(attended, residual, layer.attention_norm, layer.mlp_norm)
            hidden, residual = self._add(self._mlp(layer, hidden), residual, layer.mlp_output_norm, next_norm)
        return hidden

    def logits(
        self,
        hidden: Tensor,  # [num_rows, hidden_size]
    ) -> Tensor:  # [num_rows, vocab_size] float32
        logits, cap = self.kernels.linear(hidden, self._head, None).float(), self.spec.logit_softcap
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        return torch.tanh(logits / cap) * cap if cap else logits

    def greedy(
        self,
        hidden: Tensor,  # [num_rows, hidden_size]
    ) -> Tensor:  # [num_rows] int64
        if self.spec.logit_softcap:
            return self.kernels.sampling.argmax(self.logits(hidden))
        return self.kernels.sampling.argmax(self.kernels.linear(hidden, self._head, None))

    def _embed(self, inputs: StepInputs) -> Tensor:  # [num_tokens, hidden_size]
        if self._embedding is None:
            hidden = read_rows(self._head, inputs.token_ids).to(self._norm.weight.dtype)
        else:
            hidden = torch.nn.functional.embedding(inputs.token_ids, self._embedding)
        if self.spec.embed_scale != 1.0:
            hidden = hidden * self.spec.embed_scale
        return hidden if self._positions is None else hidden + self._positions[inputs.positions]

    def _normed(self, x: Tensor, norm: NormWeight) -> Tensor:
        if self.spec.norm.kind == "layer":
            return self.kernels.layer_norm(x, norm.weight, norm.bias, self.spec.norm.eps)
        return self.kernels.rms_norm(x, norm.weight, self.spec.norm.eps)

    def _add(
        self,
        branch: Tensor,  # [num_tokens, hidden_size]
        residual: Tensor,  # [num_tokens, hidden_size]
        output_norm: NormWeight | None,
        next_norm: NormWeight | None,
    ) -> tuple[Tensor, Tensor]:  # what the next branch reads, and the next residual
        if output_norm is not None:
            branch = self._normed(branch, output_norm)
        if self.spec.residual_scale != 1.0:
            branch = branch * self.spec.residual_scale
        if next_norm is not None and self.spec.norm.kind == "rms":
            return self.kernels.add_rms_norm(branch, residual, next_norm.weight, self.spec.norm.eps)
        total = branch + residual
        return total if next_norm is None else self._normed(total, next_norm), total

    def _mix(
        self,
        layer: DecoderLayer,
        hidden: Tensor,  # [num_tokens, hidden_size]
        rotations: Mapping[int, Rotation],
        inputs: StepInputs,
        memory: KVCache | DeltaStates,
    ) -> Tensor:  # [num_tokens, in_features of the layer's output]
        mixed, mixer = self._project(layer.qkv, hidden), layer.mixer
        if isinstance(mixer, AttentionSpec):
            assert isinstance(memory, KVCache)
            return self._attend(layer, mixer, mixed, rotations[mixer.rope], inputs, memory)
        assert isinstance(memory, DeltaStates)
        assert inputs.states is not None
        return attend_linearly(mixer, hidden, mixed, self.kernels, memory, inputs.states)

    def _attend(
        self,
        layer: DecoderLayer,
        heads: AttentionSpec,
        mixed: Tensor,  # [num_tokens, (num_heads + 2 num_kv_heads) * head_dim], and the gate where there is one
        rotation: Rotation,
        inputs: StepInputs,
        cache: KVCache,
    ) -> Tensor:  # [num_tokens, num_heads * head_dim]
        head_norm, gate = layer.head_norm, mixed[:, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim :]
        if head_norm is not None and heads.qk_norm == "whole":
            mixed, head_norm = self._norm_whole(mixed, head_norm), None
        mixed = mixed.view(mixed.shape[0], -1, heads.head_dim)
        if heads.gated:
            mixed = mixed[:, : heads.num_heads + 2 * heads.num_kv_heads]
        query = self.kernels.rotary_store(mixed, *rotation, head_norm, cache, inputs.slot_mapping)
        attended = self.kernels.paged_attention(
            query, cache, inputs.attention, heads.score_scale, heads.window, heads.softcap, layer.sinks
        )
        attended = attended.flatten(1)
        return self.kernels.gated_activation(torch.cat((gate, attended), dim=1), "sigmoid") if heads.gated else attended

    def _norm_whole(
        self,
        mixed: Tensor,  # [num_tokens, (num_heads + 2 num_kv_heads) * head_dim]
        norm: HeadNorm,  # of all heads together
    ) -> Tensor:
        queries, keys = len(norm.query), len(norm.key)
        query, key, value = mixed.tensor_split((queries, queries + keys), dim=1)
        normed = (
            self.kernels.rms_norm(part.contiguous(), weight, norm.eps)
            for part, weight in ((query, norm.query), (key, norm.key))
        )
        return torch.cat((*normed, value), dim=1)

    def _mlp(
        self,
        layer: DecoderLayer,
        hidden: Tensor,  # [num_tokens, hidden_size]
    ) -> Tensor:  # [num_tokens, hidden_size]
        shared = None if layer.dense is None else self._feed_forward(layer, layer.dense, hidden)
        if layer.mixture is None:
            assert shared is not None
            return shared
        mixture = layer.mixture
        scores = self.kernels.exact_linear(hidden, mixture.router.weight, mixture.router.bias).float()
        weights, ids = self.kernels.route(scores, mixture.routing, mixture.correction)
        mixed = self.kernels.experts(hidden, ids, weights, mixture.gate_up, mixture.down, layer.activation, layer.gated)
        if shared is None:
            return mixed
        if mixture.shared_gate is not None:
            gate = self.kernels.exact_linear(hidden, mixture.shared_gate.weight, None)
            shared = self.kernels.activation(gate, "sigmoid") * shared
        return mixed + shared

    def _feed_forward(
        self,
        layer: DecoderLayer,
        weights: DenseWeights,
        hidden: Tensor,  # [num_tokens, hidden_size]
    ) -> Tensor:  # [num_tokens, hidden_size]
        inner = self._project(weights.gate_up, hidden)
        activate = self.kernels.gated_activation if layer.gated else self.kernels.activation
        return self._project(weights.down, activate(inner, layer.activation))

    def _project(
        self,
        projection: Projection,
        x: Tensor,  # [num_tokens, in_features]
    ) -> Tensor:  # [num_tokens, out_features]
        return self.kernels.linear(x, projection.weight, projection.bias)
