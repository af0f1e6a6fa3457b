"""DeepSeek-V2 and V3: latent attention, dense layers before mixtures whose experts stand in groups, shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.description.families.dense import model, rope, silu_mlp
from engine.description.families.moe import SINGLE, STACKED
from engine.description.keys import ConfigKeys
from engine.description.names import MtpNames, NameTable
from engine.description.rope import RopeConfig, mscale
from engine.description.spec import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, MlpSpec, ModelSpec
from shared.errors import ModelError

SLOTS = {
    "input_norm": ("input_layernorm",),
    "query": ("self_attn.q_proj",),
    "query_down": ("self_attn.q_a_proj",),
    "query_norm": ("self_attn.q_a_layernorm",),
    "query_up": ("self_attn.q_b_proj",),
    "latent": ("self_attn.kv_a_proj_with_mqa",),
    "key_norm": ("self_attn.kv_a_layernorm",),
    "key_value_up": ("self_attn.kv_b_proj",),
    "output": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "router": ("mlp.gate",),
    "correction": ("mlp.gate.e_score_correction_bias",),
    "shared_gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared_down": ("mlp.shared_experts.down_proj",),
}
NAMES = (NameTable(slots=SLOTS | SINGLE), NameTable(slots=SLOTS | STACKED))
MTP = MtpNames(
    count_key="num_nextn_predict_layers",
    prefix="model.layers.{layer}.",
    layer="",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    combine="eh_proj",
    norm="shared_head.norm",
    feeds_normed=False,
    skips_first=True,
)


def deepseek_v2(c: ConfigKeys) -> ModelSpec:
    c.only("scoring_func", "softmax")
    c.only("topk_method", "greedy", "group_limited_greedy")
    c.only("norm_topk_prob", False)
    groups, kept = 1, 1
    if c.raw.get("topk_method") == "group_limited_greedy":
        groups, kept = c.positive_int("n_group"), c.positive_int("topk_group")
    experts = _experts(c, score="softmax", renormalise=False, groups=groups, kept_groups=kept, group_best=1)
    return _deepseek(c, "DeepseekV2ForCausalLM", experts, dense=c.count("first_k_dense_replace"), interleaved=True)


def deepseek_v3(c: ConfigKeys) -> ModelSpec:
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    experts = _experts(
        c,
        score="sigmoid",
        renormalise=c.flag("norm_topk_prob", True),
        groups=c.positive_int("n_group", 8),
        kept_groups=c.positive_int("topk_group", 4),
        correction=True,
    )
    spec = _deepseek(
        c,
        "DeepseekV3ForCausalLM",
        experts,
        dense=c.count("first_k_dense_replace", 3),
        interleaved=c.flag("rope_interleave", True),
    )
    return replace(spec, unused_layers=c.count("num_nextn_predict_layers", 1))


def _deepseek(c: ConfigKeys, architecture: str, experts: ExpertsSpec, *, dense: int, interleaved: bool) -> ModelSpec:
    c.only("moe_layer_freq", 1)
    for key in ("attention_bias", "mlp_bias"):
        c.only(key, False)
    turned = replace(rope(c), interleaved=interleaved)
    heads = _attention(c, turned)
    shared = experts.inner * c.positive_int("n_shared_experts", 1 if experts.correction else 2)
    plain, mixed = silu_mlp(c), MlpSpec(inner=shared, experts=experts)
    layers = [LayerSpec(attention=heads, mlp=mlp) for mlp in (plain, mixed)]
    return model(c, architecture, lambda index: layers[index >= dense], ropes=(turned,))


def _attention(c: ConfigKeys, turned: RopeConfig) -> AttentionSpec:
    num_heads = c.positive_int("num_attention_heads")
    c.only("num_key_value_heads", num_heads)
    latent = LatentSpec(
        rank=c.positive_int("kv_lora_rank", 512),
        rotated=c.positive_int("qk_rope_head_dim", 64),
        plain=c.positive_int("qk_nope_head_dim", 128),
        value_dim=c.positive_int("v_head_dim", 128),
        query_rank=0 if c.raw.get("q_lora_rank", 1536) is None else c.positive_int("q_lora_rank", 1536),
    )
    if latent.rotated % 2:
        raise ModelError(f"qk_rope_head_dim must be even for rotary embeddings, got {latent.rotated}")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rotated,
        latent=latent,
        scale=(latent.plain + latent.rotated) ** -0.5 * _stretch(c, turned) ** 2,
    )


def _stretch(c: ConfigKeys, turned: RopeConfig) -> float:
    """Of queries and keys each, whole ones: what the rope does with its own parts is in its attention_factor."""
    scaling = c.raw.get("rope_parameters") or c.raw.get("rope_scaling") or {}
    weight = scaling.get("mscale_all_dim") if turned.kind != "default" else None
    if not weight:
        return 1.0
    return mscale(turned.factor, ConfigKeys(scaling).number("mscale_all_dim"))


def _experts(c: ConfigKeys, **routing: Any) -> ExpertsSpec:
    count, top_k = c.positive_int("n_routed_experts"), c.positive_int("num_experts_per_tok")
    groups, kept = routing["groups"], routing["kept_groups"]
    if count % groups:
        raise ModelError(f"n_routed_experts ({count}) is no multiple of n_group ({groups})")
    if kept > groups:
        raise ModelError(f"topk_group ({kept}) is larger than n_group ({groups})")
    if top_k > count // groups * kept:
        raise ModelError(f"num_experts_per_tok ({top_k}) is larger than the {kept} groups of {count // groups} experts")
    return ExpertsSpec(
        count=count,
        top_k=top_k,
        inner=c.positive_int("moe_intermediate_size"),
        scale=c.number("routed_scaling_factor", 1.0),
        **routing,
    )
