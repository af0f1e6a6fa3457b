"""The tensors that a checkpoint must hold, by name and shape, as transformers writes them."""

from __future__ import annotations

from engine.modeling.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")  # left by old exporters; never weights

Shape = tuple[int, ...]


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model but, where the embedding is tied, the head."""
    matrix = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {EMBEDDING: matrix, NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = matrix
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes |= {prefix + name: shape for name, shape in _layer_tensors(config).items()}
    return shapes


def _layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shapes |= _projection("self_attn.q_proj", queries, hidden, bias=config.qkv_bias)
    shapes |= _projection("self_attn.k_proj", keys, hidden, bias=config.qkv_bias)
    shapes |= _projection("self_attn.v_proj", keys, hidden, bias=config.qkv_bias)
    shapes |= _projection("self_attn.o_proj", hidden, queries, bias=config.output_bias)
    shapes |= _projection("mlp.gate_proj", inner, hidden, bias=config.mlp_bias)
    shapes |= _projection("mlp.up_proj", inner, hidden, bias=config.mlp_bias)
    shapes |= _projection("mlp.down_proj", hidden, inner, bias=config.mlp_bias)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    return shapes


def _projection(name: str, out_features: int, in_features: int, *, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (out_features, in_features)}
    return weight | {f"{name}.bias": (out_features,)} if bias else weight
