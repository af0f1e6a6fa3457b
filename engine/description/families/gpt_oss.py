"""gpt-oss: attention sinks, windows by turns, experts with biases and a clamped gate."""

from __future__ import annotations

from engine.description.families.dense import FULL, LLAMA_SLOTS, SLIDING, attention, model, rope, windows
from engine.description.families.moe import local_experts
from engine.description.keys import ConfigKeys
from engine.description.names import NameTable
from engine.description.spec import LayerSpec, MlpSpec, ModelSpec

NAMES = (
    NameTable(
        slots=LLAMA_SLOTS
        | {
            "sinks": ("self_attn.sinks",),
            "router": ("mlp.router",),
            "experts_gate_up": ("mlp.experts.gate_up_proj",),
            "experts_down": ("mlp.experts.down_proj",),
        },
        experts_transposed=True,
        experts_interleaved=True,
    ),
)
THETA = 150_000.0


def gpt_oss(c: ConfigKeys) -> ModelSpec:
    c.only("hidden_act", "silu")
    c.only("swiglu_alpha", 1.702)
    c.only("swiglu_limit", 7.0)
    experts = local_experts(c, score="softmax_of_chosen", router_bias=True, bias=True)
    mlp = MlpSpec(inner=0, activation="clamped_swiglu", experts=experts)
    bias = c.flag("attention_bias", True)
    seen = windows(c, [FULL if index % 2 else SLIDING for index in range(c.positive_int("num_hidden_layers"))])

    def layer(index: int) -> LayerSpec:
        heads = attention(c, head_dim=64, window=seen[index], sinks=True, qkv_bias=bias, output_bias=bias)
        return LayerSpec(attention=heads, mlp=mlp)

    return model(c, "GptOssForCausalLM", layer, ropes=(rope(c, theta=THETA),))
