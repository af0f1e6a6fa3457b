"""Mixtures of experts in Llama-like layers: Mixtral, Qwen2-MoE, Qwen3-MoE.

transformers writes the experts of a layer as one stack since version 5, and one by one before.
"""

from __future__ import annotations

from typing import Any

from engine.description.families.dense import LLAMA_SLOTS, attention, model, rope, silu_mlp
from engine.description.families.llama import qwen3_heads, qwen_windows
from engine.description.keys import ConfigKeys
from engine.description.names import NameTable
from engine.description.spec import ExpertsSpec, LayerSpec, MlpSpec, ModelSpec
from shared.errors import ModelError

STACKED = {"experts_gate_up": ("mlp.experts.gate_up_proj",), "experts_down": ("mlp.experts.down_proj",)}
SINGLE = {
    "experts_gate_up": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    "experts_down": ("mlp.experts.{expert}.down_proj",),
}
QWEN_SLOTS = LLAMA_SLOTS | {
    "router": ("mlp.gate",),
    "shared_gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_down": ("mlp.shared_expert.down_proj",),
    "shared_gate": ("mlp.shared_expert_gate",),
}
QWEN_NAMES = (NameTable(slots=QWEN_SLOTS | SINGLE), NameTable(slots=QWEN_SLOTS | STACKED))
MIXTRAL_NAMES = (
    NameTable(
        slots=LLAMA_SLOTS
        | {
            "router": ("block_sparse_moe.gate",),
            "experts_gate_up": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
            "experts_down": ("block_sparse_moe.experts.{expert}.w2",),
        }
    ),
    NameTable(slots=LLAMA_SLOTS | {"router": ("mlp.gate",)} | STACKED),
)


def mixtral(c: ConfigKeys) -> ModelSpec:
    c.only("hidden_act", "silu", "swish")
    window = c.positive_int("sliding_window") if c.raw.get("sliding_window") is not None else 0
    experts = local_experts(c)
    layer = LayerSpec(attention=attention(c, window=window), mlp=MlpSpec(inner=0, experts=experts))
    return model(c, "MixtralForCausalLM", lambda index: layer, ropes=(rope(c, theta=1_000_000.0),))


def qwen2_moe(c: ConfigKeys) -> ModelSpec:
    seen, sparse, bias = qwen_windows(c), sparse_layers(c), c.flag("qkv_bias", True)
    experts = qwen_experts(c, shared_gate=True)
    shared = MlpSpec(inner=c.positive_int("shared_expert_intermediate_size"), experts=experts)

    def layer(index: int) -> LayerSpec:
        mlp = shared if sparse[index] else silu_mlp(c)
        return LayerSpec(attention=attention(c, window=seen[index], qkv_bias=bias), mlp=mlp)

    return model(c, "Qwen2MoeForCausalLM", layer)


def qwen3_moe(c: ConfigKeys) -> ModelSpec:
    heads, sparse = qwen3_heads(c), sparse_layers(c)
    routed = MlpSpec(inner=0, experts=qwen_experts(c, shared_gate=False))

    def layer(index: int) -> LayerSpec:
        return LayerSpec(attention=heads[index], mlp=routed if sparse[index] else silu_mlp(c))

    return model(c, "Qwen3MoeForCausalLM", layer)


def qwen_experts(c: ConfigKeys, *, shared_gate: bool, renormalise: bool | None = None) -> ExpertsSpec:
    """`renormalise`: as norm_topk_prob says where it is None."""
    c.only("hidden_act", "silu", "swish")
    renormalise = c.flag("norm_topk_prob") if renormalise is None else renormalise
    key = "num_experts" if c.raw.get("num_experts") is not None else "num_local_experts"
    inner = c.positive_int("moe_intermediate_size")
    return _experts(c, key, inner, renormalise=renormalise, shared_gate=shared_gate)


def local_experts(c: ConfigKeys, **options: Any) -> ExpertsSpec:
    """As Mixtral spells them.  `options` are fields of ExpertsSpec."""
    return _experts(c, "num_local_experts", c.positive_int("intermediate_size"), **options)


def _experts(c: ConfigKeys, count_key: str, inner: int, **options: Any) -> ExpertsSpec:
    count, top_k = c.positive_int(count_key), c.positive_int("num_experts_per_tok")
    if top_k > count:
        raise ModelError(f"num_experts_per_tok ({top_k}) is larger than {count_key} ({count})")
    return ExpertsSpec(count=count, top_k=top_k, inner=inner, **options)


def sparse_layers(c: ConfigKeys) -> list[bool]:
    """Which layers have experts; the others are dense."""
    step, dense = c.positive_int("decoder_sparse_step", 1), set(c.integers("mlp_only_layers"))
    return [index not in dense and (index + 1) % step == 0 for index in range(c.positive_int("num_hidden_layers"))]
