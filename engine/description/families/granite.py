"""Granite: Llama with multipliers of embedding, scores, residuals and logits."""

from __future__ import annotations

from engine.description.families.dense import LLAMA_SLOTS, attention, model, silu_mlp
from engine.description.keys import ConfigKeys
from engine.description.names import NameTable
from engine.description.spec import LayerSpec, ModelSpec

NAMES = (NameTable(slots=LLAMA_SLOTS),)


def granite(c: ConfigKeys) -> ModelSpec:
    bias = c.flag("attention_bias")
    heads = attention(c, scale=c.number("attention_multiplier", 1.0), qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(attention=heads, mlp=silu_mlp(c, bias=c.flag("mlp_bias")))
    return model(
        c,
        "GraniteForCausalLM",
        lambda index: layer,
        embed_scale=c.number("embedding_multiplier", 1.0),
        residual_scale=c.number("residual_multiplier", 1.0),
        logit_scale=1.0 / c.number("logits_scaling", 1.0),
    )
