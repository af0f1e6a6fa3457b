"""The decoder of the Llama family: Llama, Mistral, Qwen2 and Qwen3 differ only by what their weights hold.

A step's tokens of all sequences lie in one tensor, and pass the layers together; only attention knows which token
belongs to whom, from its metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops.attention import AttentionMetadata
from kernels.ops.linear import LinearWeight
from kernels.provider import Kernels
from shared.modeling.config import ModelConfig
from shared.modeling.rope import RopeTable


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens, padded to the provider's row multiple."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens without padding] int64
    attention: AttentionMetadata


@dataclass(frozen=True, slots=True)
class Projection:
    weight: LinearWeight  # [out_features, in_features]
    bias: Tensor | None  # [out_features]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights."""

    input_norm: Tensor  # [hidden_size]
    qkv: Projection  # [(num_heads + 2 num_kv_heads) * head_dim, hidden_size]
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    output: Projection  # [hidden_size, num_heads * head_dim]
    post_norm: Tensor  # [hidden_size]
    gate_up: Projection  # [2 * intermediate_size, hidden_size]
    down: Projection  # [hidden_size, intermediate_size]
    window: int  # tokens that a query sees, itself included; 0: all


class Decoder:
    """Weights bound to the kernels that serve them."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        kernels: Kernels,
        embedding: Tensor,  # [vocab_size, hidden_size]
        layers: Sequence[DecoderLayer],
        norm: Tensor,  # [hidden_size]
        head: LinearWeight,  # [vocab_size, hidden_size]
        rope: RopeTable,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.windows = tuple(sorted({layer.window for layer in layers}))
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._rope = rope
        self._scale = config.head_dim**-0.5

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def forward(self, inputs: StepInputs, caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Final hidden states [num_tokens, hidden_size]; writes this step's keys and values into `caches`."""
        ops, eps = self.kernels, self.config.rms_norm_eps
        rotation = (self._rope.cos[inputs.positions], self._rope.sin[inputs.positions])
        residual = torch.nn.functional.embedding(inputs.token_ids, self._embedding)
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        for layer, cache, next_norm in zip(self._layers, caches, next_norms, strict=True):
            hidden = self._attend(layer, hidden, rotation, inputs, cache)
            hidden, residual = ops.add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = self._project(layer.down, ops.silu_mul(self._project(layer.gate_up, hidden)))
            hidden, residual = ops.add_rms_norm(hidden, residual, next_norm, eps)
        return hidden

    def logits(
        self,
        hidden: Tensor,  # [num_rows, hidden_size]
    ) -> Tensor:  # [num_rows, vocab_size] float32
        return self.kernels.linear(hidden, self._head, None).float()

    def _attend(
        self,
        layer: DecoderLayer,
        hidden: Tensor,  # [num_tokens, hidden_size]
        rotation: tuple[Tensor, Tensor],  # each [num_tokens, 1, head_dim]
        inputs: StepInputs,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:  # [num_tokens, hidden_size]
        config, ops = self.config, self.kernels
        mixed = self._project(layer.qkv, hidden).view(hidden.shape[0], -1, config.head_dim)
        heads = config.num_heads
        turned, value = mixed[:, : -config.num_kv_heads], mixed[:, -config.num_kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = ops.rms_norm(turned[:, :heads], layer.query_norm, config.rms_norm_eps)
            key = ops.rms_norm(turned[:, heads:], layer.key_norm, config.rms_norm_eps)
            turned = torch.cat((query, key), dim=1)
        turned = ops.rotary(turned, *rotation)
        ops.store_kv(turned[:, heads:], value, *cache, inputs.slot_mapping)
        attended = ops.paged_attention(turned[:, :heads], *cache, inputs.attention, self._scale, layer.window)
        return self._project(layer.output, attended.flatten(1))

    def _project(
        self,
        projection: Projection,
        x: Tensor,  # [num_tokens, in_features]
    ) -> Tensor:  # [num_tokens, out_features]
        return self.kernels.linear(x, projection.weight, projection.bias)
