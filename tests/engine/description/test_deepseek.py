"""What the published configurations of DeepSeek-V2 and V3 mean, and what of them is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.description.reading import parse_config, read_config
from engine.modeling.kv_pool import KVLayout
from shared.errors import ModelError
from tests.engine.checkpoints import make_runner, random_prompt, save_checkpoint
from tests.engine.driver import Driver

CPU = torch.device("cpu")
ROPE = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707}, "rope_theta": 10000,
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "greedy", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
V3: dict[str, Any] = V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "rope_scaling": ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280,
}  # fmt: skip


def test_v2_lite() -> None:
    spec = parse_config(V2_LITE)
    heads = spec.attentions[5]
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.rotation) == (16, 1, 576, (0, 64))
    assert heads.latent is not None and heads.latent.query_rank == 0
    assert heads.score_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert spec.ropes[0].interleaved and spec.ropes[0].attention_factor == 1.0
    assert [layer.mlp.experts is None for layer in spec.layers] == [True] + [False] * 26
    assert spec.layers[5].mlp.inner == 2 * 1408
    layout = KVLayout(spec.attentions, torch.bfloat16, CPU)
    assert sum(layout.layer_bytes(16)) == 27 * 16 * 576 * 2
    assert [len(cache.tensors) for cache in layout.make_caches([2] * 27, 16)] == [1] * 27


def test_v3() -> None:
    spec = parse_config(V3)
    assert [layer.mlp.experts is None for layer in spec.layers] == [True] * 3 + [False] * 58
    experts, latent = spec.layers[3].mlp.experts, spec.attentions[3].latent
    assert experts is not None and latent is not None
    assert (experts.score, experts.groups, experts.kept_groups, experts.group_best) == ("sigmoid", 8, 4, 2)
    assert experts.correction and experts.renormalise and experts.scale == 2.5
    assert latent.query_rank == 1536


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        (V2_LITE, {"num_key_value_heads": 4}, "num_key_value_heads 4 is not supported; supported: 16"),
        (V2_LITE, {"attention_bias": True}, "attention_bias True is not supported"),
        (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        (V2_LITE, {"q_lora_rank": 0}, "q_lora_rank must be a positive integer, got 0"),
        (V2_LITE, {"kv_lora_rank": -1}, "kv_lora_rank must be a positive integer, got -1"),
        (V2_LITE, {"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even for rotary embeddings, got 63"),
        (V2_LITE, {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer of at least 0, got -1"),
        (V2_LITE, {"num_experts_per_tok": 65}, r"num_experts_per_tok .65. is larger than the 1 groups of 64 experts"),
        (V2_LITE, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (
            V2_LITE,
            {"topk_method": "group_limited_greedy", "n_group": 7},
            r"n_routed_experts .64. is no multiple of n_g",
        ),
        (V3, {"topk_group": 9}, r"topk_group .9. is larger than n_group .8."),
        (V3, {"num_experts_per_tok": 200}, r"num_experts_per_tok .200. is larger than the 4 groups of 32 experts"),
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        (V3, {"rope_scaling": ROPE | {"mscale": 1.0, "mscale_all_dim": -1}}, "mscale_all_dim must be a positive"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(
    base: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base | change), encoding="utf-8")
    with pytest.raises(ModelError, match=message) as caught:
        read_config(tmp_path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_layers_that_propose_drafts_are_left_out(tmp_path: Path) -> None:
    """The published V3 has one behind the others; a second one is not known."""
    save_checkpoint(tmp_path, "deepseek-v3")
    found = [generate(tmp_path)]
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    found.append(generate(tmp_path))
    assert found[0] == found[1]
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has model\.layers\.4\.eh_proj\.weight, which DeepseekV3ForCausalLM"):
        make_runner(tmp_path)


def generate(directory: Path) -> list[int]:
    driver = Driver(make_runner(directory))
    sequence = driver.add(0, random_prompt(9, seed=3))
    driver.generate(3)
    return sequence.output
