"""OLMo 2: norms of what attention and MLP give in place of norms before them, and of all heads together."""

from __future__ import annotations

from engine.description.families.dense import OUTPUT_NORM_SLOTS, attention, model, silu_mlp
from engine.description.keys import ConfigKeys
from engine.description.names import NameTable
from engine.description.spec import LayerSpec, ModelSpec

NAMES = (NameTable(slots=OUTPUT_NORM_SLOTS),)


def olmo2(c: ConfigKeys) -> ModelSpec:
    bias = c.flag("attention_bias")
    layer = LayerSpec(
        attention=attention(c, qk_norm="whole", qkv_bias=bias, output_bias=bias),
        mlp=silu_mlp(c),
        input_norm=False,
        attention_norm=True,
        mlp_norm=False,
        mlp_output_norm=True,
    )
    return model(c, "Olmo2ForCausalLM", lambda index: layer)
