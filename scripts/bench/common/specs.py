"""What the models that benches make are: config.json by name, in families that `bench_peers` plays.

dense    S        134.5 M parameters, hidden 576, 30 layers, 9 / 3 heads, vocabulary 49,152, tied
         M        348.7 M parameters, hidden 1,024, 24 layers, 16 / 8 heads, vocabulary 32,000
moe      moe      497 M parameters in Qwen3-MoE's layers, 100 M of them active: 8 of 64 experts, tied
         gpt-oss  351 M parameters in gpt-oss's layers, 87 M of them active: 4 of 32 experts, sinks, windows by turns
gpt2     gpt2     133 M parameters, hidden 768, 13 layers, learned positions, tied
gemma    gemma3   132 M parameters, hidden 640, 18 layers, 4 / 1 heads of 256, windows of 512, tied
"""

from __future__ import annotations

from typing import Any

COMMON = {"torch_dtype": "bfloat16", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SILU = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}


def llama(hidden: int, inner: int, layers: int, heads: tuple[int, int], vocab_size: int, **own: Any) -> dict[str, Any]:
    """A config.json; `heads`: of queries, and of keys and values.  `own` fields override the others."""
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "head_dim": 64,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": vocab_size,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, **COMMON,
    }  # fmt: skip
    return fields | own


def qwen3_moe() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **SILU, **COMMON,
        "hidden_size": 768, "intermediate_size": 2048, "moe_intermediate_size": 256, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True,
    }  # fmt: skip


def gpt_oss() -> dict[str, Any]:
    """Sizes apart as published, but for experts in bfloat16; YaRN is what its peers insist on."""
    layers = 12
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **SILU, **COMMON, "attention_bias": True,
        "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": layers, "head_dim": 64,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
        "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "initial_context_length": 4096, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0, "rope_scaling": yarn | {"original_max_position_embeddings": 4096},
        "router_aux_loss_coef": 0.9, "output_router_logits": False, "tie_word_embeddings": False,
    }  # fmt: skip


def gpt2() -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", **COMMON,
        "n_embd": 768, "n_inner": None, "n_layer": 13, "n_head": 12, "n_positions": 4096, "n_ctx": 4096,
        "vocab_size": 49152, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip


def gemma3() -> dict[str, Any]:
    layers, pattern = 18, 6
    kinds = ["full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **COMMON,
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0.0,
        "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": layers, "head_dim": 256,
        "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 49152, "query_pre_attn_scalar": 256,
        "sliding_window": 512, "sliding_window_pattern": pattern, "layer_types": kinds,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0, "rope_scaling": None, "tie_word_embeddings": True,
    }  # fmt: skip


SPECS: dict[str, dict[str, Any]] = {
    "S": llama(576, 1536, 30, (9, 3), 49152, tie_word_embeddings=True, rope_theta=100_000.0),
    "M": llama(1024, 2816, 24, (16, 8), 32000),
    "moe": qwen3_moe(),
    "gpt-oss": gpt_oss(),
    "gpt2": gpt2(),
    "gemma3": gemma3(),
}
FAMILIES = {"dense": ("S", "M"), "moe": ("moe", "gpt-oss"), "gpt2": ("gpt2",), "gemma": ("gemma3",)}
