"""Llama, Mistral, Qwen2 and Qwen3: they differ by biases, windows and norms of the heads."""

from __future__ import annotations

from engine.description.families.dense import FULL, LLAMA_SLOTS, SLIDING, attention, model, silu_mlp, windows
from engine.description.keys import ConfigKeys
from engine.description.names import NameTable
from engine.description.spec import AttentionSpec, LayerSpec, ModelSpec

NAMES = (NameTable(slots=LLAMA_SLOTS),)
QWEN3_HEAD_DIM = 128  # what the family means by a head_dim left out; the others mean hidden_size / heads


def llama(c: ConfigKeys) -> ModelSpec:
    bias = c.flag("attention_bias")
    layer = LayerSpec(attention=attention(c, qkv_bias=bias, output_bias=bias), mlp=silu_mlp(c, bias=c.flag("mlp_bias")))
    return model(c, "LlamaForCausalLM", lambda index: layer)


def mistral(c: ConfigKeys) -> ModelSpec:
    window = c.positive_int("sliding_window") if c.raw.get("sliding_window") is not None else 0
    layer = LayerSpec(attention=attention(c, window=window), mlp=silu_mlp(c))
    return model(c, "MistralForCausalLM", lambda index: layer)


def qwen2(c: ConfigKeys) -> ModelSpec:
    seen = qwen_windows(c)
    return model(
        c,
        "Qwen2ForCausalLM",
        lambda index: LayerSpec(attention=attention(c, window=seen[index], qkv_bias=True), mlp=silu_mlp(c)),
    )


def qwen3(c: ConfigKeys) -> ModelSpec:
    heads = qwen3_heads(c)
    return model(c, "Qwen3ForCausalLM", lambda index: LayerSpec(attention=heads[index], mlp=silu_mlp(c)))


def qwen3_heads(c: ConfigKeys) -> list[AttentionSpec]:
    """Of every layer."""
    seen, bias = qwen_windows(c), c.flag("attention_bias")
    return [
        attention(c, head_dim=QWEN3_HEAD_DIM, window=window, qk_norm="head", qkv_bias=bias, output_bias=bias)
        for window in seen
    ]


def qwen_windows(c: ConfigKeys) -> list[int]:
    """Off unless `use_sliding_window` says otherwise, and then from `max_window_layers` on."""
    count = c.positive_int("num_hidden_layers")
    if c.raw.get("sliding_window") is None or not c.flag("use_sliding_window"):
        return [0] * count
    first = int(c.raw.get("max_window_layers") or 0)
    return windows(c, [SLIDING if index >= first else FULL for index in range(count)])
