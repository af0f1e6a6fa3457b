"""What the published configurations of Gemma 4 mean for its heads, and what of them is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.description.reading import parse_config, read_config
from engine.modeling.kv_pool import KVLayout
from shared.errors import ModelError

PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "attention_bias": False, "attention_k_eq_v": True,
    "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "hidden_size_per_layer_input": 0,
    "intermediate_size": 9216, "max_position_embeddings": 131072, "num_attention_heads": 8,
    "num_global_key_value_heads": 2, "num_hidden_layers": 8, "num_key_value_heads": 4, "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06, "sliding_window": 1024, "use_bidirectional_attention": "vision", "vocab_size": 262144,
}  # fmt: skip


def test_heads_of_two_sizes() -> None:
    """Every sixth layer and the last are wide, see everything, and have one projection for keys and values."""
    spec = parse_config(PUBLISHED)
    wide = [index for index, heads in enumerate(spec.attentions) if not heads.window]
    assert wide == [5, 7]
    small, large = spec.attentions[0], spec.attentions[5]
    assert (small.num_kv_heads, small.head_dim, small.keys_are_values, small.rotation) == (4, 256, False, (1, 256))
    assert (large.num_kv_heads, large.head_dim, large.keys_are_values, large.rotation) == (2, 512, True, (0, 512))
    assert spec.ropes[0].turning == 0.25
    layout = KVLayout(spec.attentions, torch.bfloat16, torch.device("cpu"))
    assert sum(layout.layer_bytes(16)) == 16 * 2 * 2 * (6 * 4 * 256 + 2 * 2 * 512)


def test_what_transformers_writes_says_the_same() -> None:
    """It has an object of keys for each layer that differs."""
    written = {key: value for key, value in PUBLISHED.items() if "global" not in key}
    own = {str(index): {"head_dim": 512, "num_key_value_heads": 2} for index in (5, 7)}
    assert parse_config(written | {"per_layer_config": own}) == parse_config(PUBLISHED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256 is not supported; supported: 0"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input 256 is not supported; supported: 0"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers 10 is not supported; supported: 0"),
        ({"enable_moe_block": True}, "enable_moe_block True is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ({"per_layer_config": [1]}, "per_layer_config must be an object of objects"),
        ({"per_layer_config": {"0": 1}}, "per_layer_config must be an object of objects"),
        ({"global_head_dim": 511}, "head_dim must be even for rotary embeddings, got 511"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED | change), encoding="utf-8")
    with pytest.raises(ModelError, match=message) as caught:
        read_config(tmp_path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
