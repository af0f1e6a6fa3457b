"""Small random checkpoints of each family, written by transformers, and transformers' own logits for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from engine.execution.runner import ModelRunner
from engine.loading.load import load_runner
from shared.config import Settings
from tests.kernels.cpu.natives import load_build

VOCAB = 211
KERNELS = ("torch", "native")
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 30, "sliding_window": 11, "layer_types": None}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 400.0},
}
GEMMA4 = {
    "head_dim": 22,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "final_logit_softcapping": 5.0,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
}
QWEN_MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 12,
    "head_dim": 16,
    "rope_parameters": {**YARN_ROPE, "truncate": False},
}
# Experts in groups of three and of four; queries of a vector of their own, or of the hidden state.
DEEPSEEK = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}
DEEPSEEK_V2 = DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
DEEPSEEK_V3 = DEEPSEEK | {"n_group": 3, "topk_group": 2, "scoring_func": "sigmoid"}
MSCALE_ROPE = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.1}
WIDE_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "qk_nope_head_dim": 16, "v_head_dim": 48}
HYBRID: dict[str, Any] = {
    "head_dim": 24,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "initializer_range": 0.1,  # with more the float32 of transformers' delta rule shows in the fourth digit
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
HYBRID_MOE: dict[str, Any] = {**QWEN_MOE, "shared_expert_intermediate_size": 48}
# name -> (family, what differs from COMMON)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "mistral-window": ("Mistral", {"sliding_window": 11, "head_dim": 20}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 22}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN_ROPE, "attention_bias": True}),
    "gpt2": ("GPT2LMHead", {"n_inner": 80, "layer_norm_epsilon": 1e-5}),
    "gpt2-untied": ("GPT2LMHead", {"tie_word_embeddings": False}),
    "phi3": ("Phi3", {"sliding_window": 13}),
    "phi3-partial": ("Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {**GEMMA, "rope_parameters": GEMMA3_ROPE}),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4-values": (
        "Gemma4",
        {**GEMMA4, "attention_k_eq_v": False, "global_head_dim": 16, "layer_types": None, "num_hidden_layers": 6},
    ),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", GRANITE),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 17}),
    "qwen2-moe": ("Qwen2Moe", {**QWEN_MOE, "shared_expert_intermediate_size": 48, "num_hidden_layers": 4}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_MOE, "head_dim": 22, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "deepseek-v2": ("DeepseekV2", {**DEEPSEEK_V2, "rope_parameters": MSCALE_ROPE}),
    "deepseek-v2-lite": ("DeepseekV2", {**DEEPSEEK, **WIDE_HEADS, "topk_method": "greedy", "q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3", {**DEEPSEEK_V3, "rope_parameters": MSCALE_ROPE}),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {**DEEPSEEK_V3, **WIDE_HEADS, "rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None},
    ),
}
# With layers of linear attention, whose states plans manage.
HYBRID_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", {**HYBRID, **HYBRID_MOE, "mlp_only_layers": [3]}),
    "qwen3-next-yarn": (
        "Qwen3Next",
        {**HYBRID, **HYBRID_MOE, "rope_parameters": {**YARN_ROPE, "partial_rotary_factor": 0.5}},
    ),
    "qwen3-next-bias": ("Qwen3Next", {**HYBRID, **HYBRID_MOE, "attention_bias": True, "linear_conv_kernel_dim": 3}),
    "qwen3.5": ("Qwen3_5", {**HYBRID, "layer_types": [*["linear_attention"] * 3, "full_attention"]}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**HYBRID, **HYBRID_MOE}),
}
# family -> transformers' classes, where they do not follow from it
CLASSES = {
    "GPT2LMHead": ("GPT2Config", "GPT2LMHeadModel"),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "Qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "Qwen3_5Moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
}
# Dimensions that the native kernels serve; torch's are odd on purpose.
EVEN = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 32}


def save_checkpoint(
    directory: Path, variant: str, kernels: str = "torch", further: dict[str, Any] | None = None, **save: Any
) -> Any:
    """Write the variant's checkpoint, in dimensions for `kernels`; returns transformers' model.

    `further` changes of its configuration come last, `save` is what `save_pretrained` takes.
    """
    family, changes = (VARIANTS | HYBRID_VARIANTS)[variant]
    torch.manual_seed(7)
    even = dict(EVEN) if kernels == "native" else {}
    if "qk_rope_head_dim" in changes:  # these heads have sizes of their own
        even.pop("head_dim", None)
    config_name, model_name = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    config = getattr(transformers, config_name)(**(COMMON | changes | even | (further or {})))
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or any(part in name for part in ("norm", "ln_", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if family == "Gemma4" and "q_norm" in name:  # nothing else scales its scores
                parameter.mul_(0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
            if name.endswith("layer_scalar"):
                buffer.mul_(0.6)
    model.save_pretrained(directory, **save)
    return model


@torch.inference_mode()
def oracle_logprobs(
    model: Any,
    token_ids: list[int],
) -> Tensor:  # [num_tokens, vocab_size]
    logprobs: Tensor = torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float(), dim=-1)
    return logprobs


def make_runner(directory: Path, kernels: str = "torch", **changes: Any) -> ModelRunner:
    """One whose plans give all layers the same blocks; those of a scheduler are in tests/integration."""
    if kernels == "native":
        load_build("native")
    settings: dict[str, Any] = {
        "kernels": kernels,
        "num_blocks": 256,
        "block_size": 16 if kernels == "native" else 8,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    }
    return load_runner(Settings.of(model=str(directory), **(settings | changes)), has_windows=False)


def random_prompt(length: int, seed: int, vocab_size: int = VOCAB) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, vocab_size) for _ in range(length)]
