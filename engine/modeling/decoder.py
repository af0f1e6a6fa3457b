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
from engine.modeling.inputs import PoolInputs, StepInputs, build_inputs
from engine.modeling.kv_pool import KVLayout, KVPool, LayerPools, Sliding
from engine.modeling.latent import LatentWeights
from engine.modeling.projection import Projection
from engine.modeling.rope import RopeTable, Rotation
from kernels.interface import Kernels
from kernels.ops.experts import ExpertWeights, Routing
from kernels.ops.kv_cache import KVCache
from kernels.ops.linear import LinearWeight
from kernels.ops.linear_int8 import read_rows
from kernels.ops.rotary_store import HeadNorm


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

    heads: AttentionSpec
    input_norm: NormWeight | None
    qkv: Projection  # [(num_heads + 2 num_kv_heads) * head_dim, hidden_size]
    head_norm: HeadNorm | None
    value_norm: Tensor | None  # [head_dim] ones, where values are normed
    latent: LatentWeights | None  # then qkv is [what queries are made of + rank + rotated, hidden_size]
    sinks: Tensor | None  # [num_heads] float32
    output: Projection  # [hidden_size, num_heads * head_dim]
    attention_norm: NormWeight | None
    mlp_norm: NormWeight | None
    activation: str
    gated: bool
    dense: DenseWeights | None  # the shared expert where there is a mixture
    mixture: MixtureWeights | None
    mlp_output_norm: NormWeight | None
    scale: Tensor | None  # [1]


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
        ropes: Mapping[tuple[int, int], RopeTable],  # by the layers' rotations
        layout: KVLayout,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.layout = layout
        self._layers = tuple(layers)
        self._pools = (0,) * len(layers)  # of each layer's keys and values
        self.windows = self._windows_by_pool(1)  # of the layers of each pool
        self._embedding = embedding
        self._positions = positions
        self._norm = norm
        self._head = head
        self._ropes = dict(ropes)
        self._next_norms = (*(layer.input_norm for layer in layers[1:]), norm)
        self._caches: list[KVCache] = []

    @property
    def device(self) -> torch.device:
        return self._norm.weight.device

    def layer_bytes(self, block_size: int) -> list[int]:
        return self.layout.layer_bytes(block_size)

    def allocate(self, num_blocks: int, block_size: int, sliding: Sliding = ()) -> KVPool:
        pools = LayerPools.of((layer.heads.window for layer in self._layers), num_blocks, sliding)
        self._pools = pools.pools
        self.windows = self._windows_by_pool(len(pools.sizes))
        self._caches = self.layout.make_caches(pools.num_blocks, block_size)
        return pools.make(block_size, [cache.tensors for cache in self._caches])

    def _windows_by_pool(self, num_pools: int) -> list[tuple[int, ...]]:
        found: list[set[int]] = [set() for _ in range(num_pools)]
        for pool, layer in zip(self._pools, self._layers, strict=True):
            found[pool].add(layer.heads.window)
        return [tuple(sorted(windows)) for windows in found]

    def forward(self, batch: StepBatch) -> Tensor:
        """Final hidden states [sum of wanted, hidden_size]; writes this step's keys and values into the pool."""
        inputs = build_inputs(batch, self.kernels, self.windows)
        return self.compute(inputs)[inputs.wanted]

    def compute(self, inputs: StepInputs) -> Tensor:
        """Final hidden states of all the step's tokens [num_tokens, hidden_size]; nothing here waits for the device."""
        rotations = {
            which: (table.cos[inputs.positions], table.sin[inputs.positions]) for which, table in self._ropes.items()
        }
        residual = self._embed(inputs)
        first = self._layers[0].input_norm
        hidden = residual if first is None else self._normed(residual, first)
        columns = zip(self._layers, self._caches, self._pools, self._next_norms, strict=True)
        for layer, cache, pool, next_norm in columns:
            attended = self._attend(layer, hidden, rotations[layer.heads.rotation], inputs.pools[pool], cache)
            hidden, residual = self._add(attended, residual, layer.attention_norm, layer.mlp_norm)
            branch, output_norm = self._mlp(layer, hidden), layer.mlp_output_norm
            if layer.scale is not None:
                branch = branch if output_norm is None else self._normed(branch, output_norm)
                branch, residual, output_norm = branch * layer.scale, residual * layer.scale, None
            hidden, residual = self._add(branch, residual, output_norm, next_norm)
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

    def _attend(
        self,
        layer: DecoderLayer,
        hidden: Tensor,  # [num_tokens, hidden_size]
        rotation: Rotation,
        inputs: PoolInputs,
        cache: KVCache,
    ) -> Tensor:  # [num_tokens, hidden_size]
        heads = layer.heads
        mixed, head_norm = self._project(layer.qkv, hidden), layer.head_norm
        if layer.latent is not None:
            values = layer.latent.attend(self.kernels, heads, mixed, rotation, inputs, cache)
            return self._project(layer.output, values)
        if head_norm is not None and heads.qk_norm == "whole":
            mixed, head_norm = self._norm_whole(mixed, head_norm), None
        mixed = mixed.view(hidden.shape[0], -1, heads.head_dim)
        if layer.value_norm is not None:
            values = mixed[:, -heads.num_kv_heads :]
            values.copy_(self.kernels.rms_norm(values.contiguous(), layer.value_norm, self.spec.norm.eps))
        query = self.kernels.rotary_store(mixed, *rotation, head_norm, cache, inputs.slot_mapping)
        attended = self.kernels.paged_attention(
            query, cache, inputs.attention, heads.score_scale, heads.window, heads.softcap, layer.sinks
        )
        return self._project(layer.output, attended.flatten(1))

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
            shared = torch.sigmoid(gate) * shared
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
        return projection(self.kernels, x)
