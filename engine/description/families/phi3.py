"""Phi-3 and Phi-4: fused projections, a part of each head rotated, LongRoPE for long sequences."""

from __future__ import annotations

from engine.description.families.dense import LLAMA_SLOTS, attention, model, rope, silu_mlp
from engine.description.keys import ConfigKeys
from engine.description.names import NameTable
from engine.description.spec import LayerSpec, ModelSpec

NAMES = (NameTable(slots=LLAMA_SLOTS | {"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}),)


def phi3(c: ConfigKeys) -> ModelSpec:
    window = c.positive_int("sliding_window") if c.raw.get("sliding_window") is not None else 0
    layer = LayerSpec(attention=attention(c, window=window), mlp=silu_mlp(c))
    return model(c, "Phi3ForCausalLM", lambda index: layer, ropes=(rope(c, partial=True),))
