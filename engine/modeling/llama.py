"""The decoder of the Llama family in torch: Llama, Mistral, Qwen2 and Qwen3 differ only by what their weights hold.

A step's tokens of all sequences lie in one tensor, and pass the layers together; only attention knows which token
belongs to whom, from its metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.modeling.batch import StepBatch
from engine.modeling.config import ModelConfig
from engine.modeling.inputs import StepInputs, build_inputs
from engine.modeling.kv_pool import KVLayout, KVPool
from engine.modeling.rope import RopeTable
from kernels.interface import Kernels
from kernels.ops.kv_cache import KVCache
from kernels.ops.linear import LinearWeight
from kernels.ops.linear_int8 import read_rows
from kernels.ops.rotary_store import HeadNorm


@dataclass(frozen=True, slots=True)
class Projection:
    weight: LinearWeight  # [out_features, in_features]
    bias: Tensor | None  # [out_features]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights."""

    input_norm: Tensor  # [hidden_size]
    qkv: Projection  # [(num_heads + 2 num_kv_heads) * head_dim, hidden_size]
    head_norm: HeadNorm | None
    output: Projection  # [hidden_size, num_heads * head_dim]
    post_norm: Tensor  # [hidden_size]
    gate_up: Projection  # [2 * intermediate_size, hidden_size]
    down: Projection  # [hidden_size, intermediate_size]
    window: int  # tokens that a query sees, itself included; 0: all


class Decoder:
    """Weights bound to the kernels that serve them: a `engine.modeling.model.Model`."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        kernels: Kernels,
        embedding: Tensor | None,  # [vocab_size, hidden_size]; None: the rows of the quantised head
        layers: Sequence[DecoderLayer],
        norm: Tensor,  # [hidden_size]
        head: LinearWeight,  # [vocab_size, hidden_size]
        rope: RopeTable,
        layout: KVLayout,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.layout = layout
        self.windows = tuple(sorted({layer.window for layer in layers}))
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._rope = rope
        self._scale = config.head_dim**-0.5
        self._caches: list[KVCache] = []

    @property
    def device(self) -> torch.device:
        return self._norm.device

    def bytes_per_block(self, block_size: int) -> int:
        return self.layout.bytes_per_block(block_size)

    def allocate(self, num_blocks: int, block_size: int) -> KVPool:
        self._caches = self.layout.make_caches(num_blocks, block_size)
        return KVPool(num_blocks, block_size, (tensor for cache in self._caches for tensor in cache.tensors))

    def forward(self, batch: StepBatch) -> Tensor:
        """Final hidden states [sum of wanted, hidden_size]; writes this step's keys and values into the pool."""
        inputs = build_inputs(batch, self.kernels, self.windows)
        return self.compute(inputs)[inputs.wanted]

    def compute(self, inputs: StepInputs) -> Tensor:
        """Final hidden states of all the step's tokens [num_tokens, hidden_size]; nothing here waits for the device."""
        ops, eps = self.kernels, self.config.rms_norm_eps
        rotation = (self._rope.cos[inputs.positions], self._rope.sin[inputs.positions])
        residual = self._embed(inputs.token_ids)
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        for layer, cache, next_norm in zip(self._layers, self._caches, next_norms, strict=True):
            hidden = self._attend(layer, hidden, rotation, inputs, cache)
            hidden, residual = ops.add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = self._project(layer.down, ops.gated_activation(self._project(layer.gate_up, hidden), "silu"))
            hidden, residual = ops.add_rms_norm(hidden, residual, next_norm, eps)
        return hidden

    def logits(
        self,
        hidden: Tensor,  # [num_rows, hidden_size]
    ) -> Tensor:  # [num_rows, vocab_size] float32
        return self.kernels.linear(hidden, self._head, None).float()

    def greedy(
        self,
        hidden: Tensor,  # [num_rows, hidden_size]
    ) -> Tensor:  # [num_rows] int64
        return self.kernels.sampling.argmax(self.kernels.linear(hidden, self._head, None))

    def _embed(
        self,
        token_ids: Tensor,  # [num_tokens] int64
    ) -> Tensor:  # [num_tokens, hidden_size]
        if self._embedding is None:
            return read_rows(self._head, token_ids).to(self._norm.dtype)
        return torch.nn.functional.embedding(token_ids, self._embedding)

    def _attend(
        self,
        layer: DecoderLayer,
        hidden: Tensor,  # [num_tokens, hidden_size]
        rotation: tuple[Tensor, Tensor],  # each [num_tokens, 1, head_dim]
        inputs: StepInputs,
        cache: KVCache,
    ) -> Tensor:  # [num_tokens, hidden_size]
        mixed = self._project(layer.qkv, hidden).view(hidden.shape[0], -1, self.config.head_dim)
        query = self.kernels.rotary_store(mixed, *rotation, layer.head_norm, cache, inputs.slot_mapping)
        attended = self.kernels.paged_attention(query, cache, inputs.attention, self._scale, layer.window)
        return self._project(layer.output, attended.flatten(1))

    def _project(
        self,
        projection: Projection,
        x: Tensor,  # [num_tokens, in_features]
    ) -> Tensor:  # [num_tokens, out_features]
        return self.kernels.linear(x, projection.weight, projection.bias)
