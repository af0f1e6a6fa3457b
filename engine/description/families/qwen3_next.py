"""Qwen3-Next and Qwen3.5: linear attention, and in every fourth layer gated attention that rotates a part of each head.

Norms are stored as what is added to one, but that of a head's result in linear attention.
"""

from __future__ import annotations

from dataclasses import replace

from engine.description.families.dense import FULL, LLAMA_SLOTS, attention, model, rope, silu_mlp
from engine.description.families.moe import QWEN_SLOTS, SINGLE, STACKED, qwen_experts, sparse_layers
from engine.description.keys import ConfigKeys
from engine.description.names import MtpNames, NameTable
from engine.description.spec import DeltaNetSpec, LayerSpec, MlpSpec, ModelSpec
from shared.errors import ModelError

LINEAR = "linear_attention"
ROTATED = 0.25  # of each head, where the file does not say
DELTA_SLOTS = {
    "delta_conv": ("linear_attn.conv1d",),
    "delta_rate": ("linear_attn.A_log",),
    "delta_step": ("linear_attn.dt_bias",),
    "delta_norm": ("linear_attn.norm",),
    "delta_output": ("linear_attn.out_proj",),
}
BY_HEAD = {"delta_qkvz": ("linear_attn.in_proj_qkvz",), "delta_gates": ("linear_attn.in_proj_ba",)}
BY_KIND = {
    "delta_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "delta_gates": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}
UNUSED = ("mtp.",)  # of a draft head
MTP = MtpNames(
    count_key="mtp_num_hidden_layers",
    prefix="mtp.",
    layer="layers.0.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    combine="fc",
    norm="norm",
    feeds_normed=True,
)
VISION = ("model.visual.", "visual.")
NAMES = (NameTable(slots=LLAMA_SLOTS | DELTA_SLOTS | BY_KIND, norms_plus_one=True, unused=UNUSED),)
NEXT_NAMES = tuple(
    NameTable(slots=QWEN_SLOTS | DELTA_SLOTS | BY_HEAD | experts, norms_plus_one=True, unused=UNUSED)
    for experts in (SINGLE, STACKED)
)
MOE_NAMES = tuple(replace(table, slots={**table.slots, **BY_KIND}) for table in NEXT_NAMES)


def _text_part(tables: tuple[NameTable, ...]) -> tuple[NameTable, ...]:
    """Of checkpoints with a vision part."""
    return tuple(replace(one, prefix="model.language_model.", unused=(*UNUSED, *VISION)) for one in tables)


MULTIMODAL_NAMES, MULTIMODAL_MOE_NAMES = _text_part(NAMES), _text_part(MOE_NAMES)


def qwen3_next(c: ConfigKeys) -> ModelSpec:
    return _hybrid(c, "Qwen3NextForCausalLM", _mlps(c, sparse_layers(c), "norm_topk_prob"))


def qwen3_5(c: ConfigKeys) -> ModelSpec:
    mlp = silu_mlp(c)
    return _hybrid(c, "Qwen3_5ForCausalLM", [mlp] * c.positive_int("num_hidden_layers"))


def qwen3_5_moe(c: ConfigKeys) -> ModelSpec:
    """All layers have experts, whose weights are always divided by their sum."""
    return _hybrid(c, "Qwen3_5MoeForCausalLM", _mlps(c, [True] * c.positive_int("num_hidden_layers"), ""))


def _hybrid(c: ConfigKeys, architecture: str, mlps: list[MlpSpec]) -> ModelSpec:
    bias, kinds = c.flag("attention_bias"), _kinds(c, len(mlps))
    heads = attention(c, head_dim=256, qk_norm="head", qkv_bias=bias, output_bias=bias, gated=True)
    delta = _delta_net(c)
    rotated = ConfigKeys({**c.raw, "partial_rotary_factor": c.raw.get("partial_rotary_factor") or ROTATED})

    def layer(index: int) -> LayerSpec:
        return LayerSpec(attention=heads if kinds[index] == FULL else delta, mlp=mlps[index])

    return model(c, architecture, layer, ropes=(rope(rotated, partial=True),))


def _kinds(c: ConfigKeys, count: int) -> list[str]:
    every = c.positive_int("full_attention_interval", 4)
    turns = [LINEAR if (index + 1) % every else FULL for index in range(count)]
    kinds = c.layer_kinds(count, (FULL, LINEAR)) or turns
    if FULL not in kinds:
        raise ModelError(f"layer_types without {FULL} is not supported")
    return kinds


def _delta_net(c: ConfigKeys) -> DeltaNetSpec:
    keys, values = c.positive_int("linear_num_key_heads", 16), c.positive_int("linear_num_value_heads", 32)
    if values % keys:
        raise ModelError(f"linear_num_value_heads ({values}) is no multiple of linear_num_key_heads ({keys})")
    width = c.positive_int("linear_conv_kernel_dim", 4)
    if width < 2:
        raise ModelError(f"linear_conv_kernel_dim must be at least 2, got {width}")
    return DeltaNetSpec(
        key_heads=keys,
        value_heads=values,
        key_dim=c.positive_int("linear_key_head_dim", 128),
        value_dim=c.positive_int("linear_value_head_dim", 128),
        conv_width=width,
    )


def _mlps(c: ConfigKeys, sparse: list[bool], renormalise_key: str) -> list[MlpSpec]:
    experts = qwen_experts(c, shared_gate=True, renormalise=c.flag(renormalise_key, True) if renormalise_key else True)
    routed = MlpSpec(inner=c.positive_int("shared_expert_intermediate_size"), experts=experts)
    return [routed if one else silu_mlp(c) for one in sparse]
