"""From checkpoint tensors to a decoder: projections that share an input are joined and packed for their kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.provider import Kernels
from shared.modeling.config import ModelConfig
from shared.modeling.llama import Decoder, DecoderLayer, Projection
from shared.modeling.rope import build_rope_table
from shared.modeling.tensors import EMBEDDING, HEAD, NORM

QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def build_decoder(config: ModelConfig, weights: dict[str, Tensor], kernels: Kernels, *, max_positions: int) -> Decoder:
    """A decoder for sequences of up to `max_positions` tokens.  Takes the tensors out of `weights` as it goes."""
    embedding = weights.pop(EMBEDDING)
    head = embedding if config.tie_word_embeddings else weights.pop(HEAD)
    rope = build_rope_table(config.rope, config.head_dim, max_positions, dtype=embedding.dtype, device=embedding.device)
    return Decoder(
        config=config,
        kernels=kernels,
        embedding=embedding,
        layers=[_layer(config, weights, kernels, index) for index in range(config.num_layers)],
        norm=weights.pop(NORM),
        head=kernels.pack_linear(head),
        rope=rope,
    )


def _layer(config: ModelConfig, weights: dict[str, Tensor], kernels: Kernels, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}."

    def projection(*names: str) -> Projection:
        return _join(weights, kernels, [prefix + name for name in names])

    return DecoderLayer(
        input_norm=weights.pop(prefix + "input_layernorm.weight"),
        qkv=projection(*QUERY_KEY_VALUE),
        query_norm=weights.pop(prefix + "self_attn.q_norm.weight", None),
        key_norm=weights.pop(prefix + "self_attn.k_norm.weight", None),
        output=projection("self_attn.o_proj"),
        post_norm=weights.pop(prefix + "post_attention_layernorm.weight"),
        gate_up=projection(*GATE_UP),
        down=projection("mlp.down_proj"),
        window=config.windows[index],
    )


def _join(weights: dict[str, Tensor], kernels: Kernels, names: list[str]) -> Projection:
    """Projections of the same input as one: [sum of out_features, in_features]."""
    parts = [weights.pop(f"{name}.weight") for name in names]
    biases = [weights.pop(f"{name}.bias", None) for name in names]
    given = [bias for bias in biases if bias is not None]
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    return Projection(kernels.pack_linear(weight), torch.cat(given) if given else None)
