"""Gemma 2, 3 and 4: four norms per layer, scaled embeddings, windows by turns.

Gemma 2 and 3 store norms as what is added to one.  Gemma 4 has heads of another size in the layers without a window.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from engine.description.families.dense import FULL, OUTPUT_NORM_SLOTS, SLIDING, attention, model, rope, windows
from engine.description.keys import ConfigKeys
from engine.description.names import NameTable
from engine.description.rope import RopeConfig
from engine.description.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from shared.errors import ModelError

VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
NAMES = (NameTable(slots=OUTPUT_NORM_SLOTS, norms_plus_one=True),)
# The text part of a checkpoint with a vision part, as transformers writes it now and as it did.
MULTIMODAL_NAMES = tuple(
    NameTable(slots=OUTPUT_NORM_SLOTS, norms_plus_one=True, prefix=prefix, head=head, unused=VISION)
    for prefix, head in (
        ("model.language_model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
    )
)
GEMMA4_SLOTS = OUTPUT_NORM_SLOTS | {"scale": ("layer_scalar",)}
GEMMA4_NAMES = (NameTable(slots=GEMMA4_SLOTS),)
GEMMA4_SENSES = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
GEMMA4_MULTIMODAL_NAMES = (NameTable(slots=GEMMA4_SLOTS, prefix="model.language_model.", unused=GEMMA4_SENSES),)
GEMMA3_GLOBAL_THETA, GEMMA3_LOCAL_THETA = 1_000_000.0, 10_000.0
# What holds where a file does not say: of models that see, the published ones have what differs from it alone.
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}

GEMMA4_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": GEMMA3_GLOBAL_THETA},
    SLIDING: {"rope_type": "default", "rope_theta": GEMMA3_LOCAL_THETA},
}


def gemma2(c: ConfigKeys) -> ModelSpec:
    count = c.positive_int("num_hidden_layers")
    seen = windows(c, [FULL if index % 2 else SLIDING for index in range(count)])
    return _gemma(c, "Gemma2ForCausalLM", seen, (rope(c),), softcap=_cap(c, "attn_logit_softcapping", 50.0))


def gemma3(given: ConfigKeys) -> ModelSpec:
    c = ConfigKeys({**GEMMA3_DEFAULTS, **given.raw})
    count, pattern = c.positive_int("num_hidden_layers"), c.positive_int("sliding_window_pattern", 6)
    seen = windows(c, [SLIDING if (index + 1) % pattern else FULL for index in range(count)])
    ropes = (rope(c, kind_of_layer=FULL, theta=GEMMA3_GLOBAL_THETA), _local_rope(c))
    softcap = _cap(c, "attn_logit_softcapping", 0.0)
    return _gemma(c, "Gemma3ForCausalLM", seen, ropes, softcap=softcap, qk_norm="head")


def gemma4(c: ConfigKeys) -> ModelSpec:
    for key in ("attention_bias", "enable_moe_block"):
        c.only(key, False)
    c.only("use_bidirectional_attention", "vision")  # of images, which a text has not
    for key, default in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
        if count := c.count(key, default):
            raise ModelError(f"{key} {count} is not supported; supported: 0")
    c.only("hidden_activation", "gelu_pytorch_tanh")
    mlp = MlpSpec(inner=c.positive_int("intermediate_size"), activation="gelu_tanh")
    seen = windows(c, _gemma4_kinds(c.positive_int("num_hidden_layers")))

    def layer(index: int) -> LayerSpec:
        return LayerSpec(
            attention=_gemma4_heads(c, index, seen[index]),
            mlp=mlp,
            attention_norm=True,
            mlp_output_norm=True,
            scaled=True,
        )

    kinds = c.raw.get("rope_parameters") or GEMMA4_ROPES
    ropes = ConfigKeys({**c.raw, "rope_parameters": kinds})
    return model(
        c,
        "Gemma4ForCausalLM",
        layer,
        ropes=(
            rope(ropes, kind_of_layer=FULL, theta=GEMMA3_GLOBAL_THETA, partial=True),
            rope(ropes, kind_of_layer=SLIDING, theta=GEMMA3_LOCAL_THETA),
        ),
        embed_scale=_as_stored(math.sqrt(c.positive_int("hidden_size")), c),
        logit_softcap=_cap(c, "final_logit_softcapping", 0.0),
        tie_word_embeddings=c.flag("tie_word_embeddings", True),
    )


def _gemma4_kinds(count: int) -> list[str]:
    """Every sixth layer and the last see everything."""
    return [SLIDING if (index + 1) % 6 and index < count - 1 else FULL for index in range(count)]


def _gemma4_heads(c: ConfigKeys, index: int, window: int) -> AttentionSpec:
    """Of a layer; transformers writes what differs as `per_layer_config`, published files have keys for it."""
    one_projection = not window and c.flag("attention_k_eq_v")
    own: Any = {}
    if not window:
        own = {"head_dim": c.positive_int("global_head_dim", 512)}
        if one_projection and c.raw.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = c.positive_int("num_global_key_value_heads")
    given = c.raw.get("per_layer_config")
    if given is not None:
        own = given.get(str(index), {}) if isinstance(given, dict) else None
        if not isinstance(own, dict):
            raise ModelError(f"per_layer_config must be an object of objects, got {given!r}")
    return attention(
        ConfigKeys({**c.raw, **own}),
        head_dim=256,
        scale=1.0,
        window=window,
        qk_norm="head",
        value_norm=True,
        keys_are_values=one_projection,
        rope=1 if window else 0,
    )


def _gemma(
    c: ConfigKeys, architecture: str, seen: list[int], ropes: tuple[RopeConfig, ...], **options: Any
) -> ModelSpec:
    for key in ("hidden_activation", "hidden_act"):
        c.only(key, "gelu_pytorch_tanh", *(["gelu_new"] if key == "hidden_act" else []))
    c.only("use_bidirectional_attention", False)
    bias, hidden_size = c.flag("attention_bias"), c.positive_int("hidden_size")
    scale = c.number("query_pre_attn_scalar", 256) ** -0.5
    mlp = MlpSpec(inner=c.positive_int("intermediate_size"), activation="gelu_tanh")

    def layer(index: int) -> LayerSpec:
        heads = attention(
            c,
            head_dim=256,
            scale=scale,
            window=seen[index],
            rope=1 if seen[index] and len(ropes) > 1 else 0,  # sliding layers have a base of their own
            qkv_bias=bias,
            output_bias=bias,
            **options,
        )
        return LayerSpec(attention=heads, mlp=mlp, attention_norm=True, mlp_output_norm=True)

    return model(
        c,
        architecture,
        layer,
        ropes=ropes,
        embed_scale=_as_stored(math.sqrt(hidden_size), c),
        logit_softcap=_cap(c, "final_logit_softcapping", 30.0 if architecture == "Gemma2ForCausalLM" else 0.0),
        tie_word_embeddings=c.flag("tie_word_embeddings", True),
    )


def _local_rope(c: ConfigKeys) -> RopeConfig:
    """Of the sliding layers: never scaled."""
    parameters = c.raw.get("rope_parameters") or {}
    if isinstance(parameters, dict) and SLIDING in parameters:
        return rope(c, kind_of_layer=SLIDING, theta=GEMMA3_LOCAL_THETA)
    return RopeConfig(theta=c.number("rope_local_base_freq", GEMMA3_LOCAL_THETA))


def _cap(c: ConfigKeys, key: str, default: float) -> float:
    """Of logits; 0 where the file says null."""
    return c.number(key, default) if c.raw.get(key, default) else 0.0


def _as_stored(value: float, c: ConfigKeys) -> float:
    """In the checkpoint's format: these models were trained with a scale that was rounded to it."""
    if str(c.raw.get("dtype") or c.raw.get("torch_dtype")) != "bfloat16":
        return value
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])
