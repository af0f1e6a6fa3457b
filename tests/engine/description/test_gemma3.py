"""What the published configurations of Gemma 3 mean, whose text parts have only what differs from transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from engine.description.reading import parse_config
from engine.description.spec import AttentionSpec

SCALED: dict[str, Any] = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
PUBLISHED: dict[str, dict[str, Any]] = {
    "4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "12b": {
        "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "27b": {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
    },
}  # fmt: skip
WHOLE = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("text", [*({**SCALED, **one} for one in PUBLISHED.values()), {}], ids=[*PUBLISHED, "nothing"])
def test_what_a_file_leaves_out_is_what_transformers_takes(text: dict[str, Any]) -> None:
    written = transformers.Gemma3TextConfig(**text).to_dict()
    assert len(written) > len(text) + 20
    assert parse_config({**WHOLE, "text_config": text}) == parse_config({**WHOLE, "text_config": written})


def test_the_smallest_model_that_sees() -> None:
    spec = parse_config({**WHOLE, "text_config": {"model_type": "gemma3_text", **SCALED, **PUBLISHED["4b"]}})
    assert (spec.vocab_size, spec.max_position_embeddings, spec.num_layers) == (262_208, 131_072, 34)
    heads = spec.layers[0].attention
    assert isinstance(heads, AttentionSpec)
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.window) == (8, 4, 256, 1024)
    assert [one.window for one in spec.attentions[4:7]] == [1024, 0, 1024]
    assert [(one.kind, one.theta, one.factor) for one in spec.ropes] == [("linear", 1e6, 8.0), ("default", 1e4, 1.0)]
