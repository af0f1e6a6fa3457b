"""What families of dense decoders have in common: grouped-query attention with rotation, norms and an MLP per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.description.keys import ConfigKeys
from engine.description.rope import RopeConfig, parse_rope
from engine.description.spec import NO_ROPE, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from shared.errors import ModelError

LLAMA_SLOTS = {
    "input_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "query_norm": ("self_attn.q_norm",),
    "key_norm": ("self_attn.k_norm",),
    "output": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# Gemma and OLMo 2 norm what attention and MLP give as well.
OUTPUT_NORM_SLOTS = LLAMA_SLOTS | {
    "attention_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_output_norm": ("post_feedforward_layernorm",),
}
FULL, SLIDING = "full_attention", "sliding_attention"


def attention(c: ConfigKeys, *, head_dim: int | None = None, **options: Any) -> AttentionSpec:
    """Heads as nearly all families spell them.  `head_dim`: the family's, where the file does not say."""
    hidden_size, num_heads = c.positive_int("hidden_size"), c.positive_int("num_attention_heads")
    num_kv_heads = c.positive_int("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})")
    if c.raw.get("head_dim") is None and head_dim is None and hidden_size % num_heads:
        raise ModelError(
            f"head_dim is missing and hidden_size ({hidden_size}) is no multiple of num_attention_heads ({num_heads})"
        )
    dims = c.positive_int("head_dim", head_dim or hidden_size // num_heads)
    if dims % 2:
        raise ModelError(f"head_dim must be even for rotary embeddings, got {dims}")
    return AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=dims, **options)


def silu_mlp(c: ConfigKeys, *, bias: bool = False) -> MlpSpec:
    c.only("hidden_act", "silu", "swish")
    return MlpSpec(inner=c.positive_int("intermediate_size"), bias=bias)


def rope(c: ConfigKeys, **options: Any) -> RopeConfig:
    return parse_rope(c.raw, c.positive_int("max_position_embeddings"), **options)


def model(c: ConfigKeys, architecture: str, layer: Callable[[int], LayerSpec], **options: Any) -> ModelSpec:
    """The model whose layers `layer` describes by index.  `options` are fields of ModelSpec; a rope is the default."""
    options.setdefault("norm", NormSpec(eps=c.number("rms_norm_eps", 1e-6)))
    if "ropes" not in options:
        options["ropes"] = (rope(c),)
    layers = tuple(layer(index) for index in range(c.positive_int("num_hidden_layers")))
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=c.positive_int("vocab_size"),
        hidden_size=c.positive_int("hidden_size"),
        layers=layers,
        max_position_embeddings=c.positive_int("max_position_embeddings"),
        dtype=str(c.raw.get("dtype") or c.raw.get("torch_dtype") or ""),
        initializer_range=c.number("initializer_range", 0.02),
        **({"tie_word_embeddings": c.flag("tie_word_embeddings")} | options),
    )
    for index, dims in {one.rotation for one in spec.attentions}:
        if index != NO_ROPE:
            spec.ropes[index].check(dims)
    return spec


def windows(c: ConfigKeys, default: Sequence[str]) -> list[int]:
    """Of every layer, by `layer_types` or the family's own pattern; 0: every earlier token."""
    kinds = c.layer_kinds(len(default), (FULL, SLIDING)) or default
    if SLIDING not in kinds:
        return [0] * len(kinds)
    window = c.positive_int("sliding_window")
    return [window if kind == SLIDING else 0 for kind in kinds]
