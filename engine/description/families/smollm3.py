"""SmolLM3: Llama in which some layers, every fourth by default, know nothing of positions."""

from __future__ import annotations

from engine.description.families.dense import FULL, LLAMA_SLOTS, SLIDING, attention, model, rope, silu_mlp, windows
from engine.description.keys import ConfigKeys
from engine.description.names import NameTable
from engine.description.spec import NO_ROPE, LayerSpec, ModelSpec
from shared.errors import ModelError

NAMES = (NameTable(slots=LLAMA_SLOTS),)
THETA = 2_000_000.0


def smollm3(c: ConfigKeys) -> ModelSpec:
    count, interval = c.positive_int("num_hidden_layers"), c.positive_int("no_rope_layer_interval", 4)
    rotates = c.integers("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
    if len(rotates) != count:
        raise ModelError(f"no_rope_layers must list {count} layers, got {len(rotates)}")
    slides = c.flag("use_sliding_window") and c.raw.get("sliding_window") is not None
    seen = windows(c, [SLIDING if slides and not rotates[index] else FULL for index in range(count)])
    bias = c.flag("attention_bias")

    def layer(index: int) -> LayerSpec:
        heads = attention(c, window=seen[index], rope=0 if rotates[index] else NO_ROPE, qkv_bias=bias, output_bias=bias)
        return LayerSpec(attention=heads, mlp=silu_mlp(c, bias=c.flag("mlp_bias")))

    return model(
        c,
        "SmolLM3ForCausalLM",
        layer,
        ropes=(rope(c, theta=THETA),),
        tie_word_embeddings=c.flag("tie_word_embeddings", True),
    )
