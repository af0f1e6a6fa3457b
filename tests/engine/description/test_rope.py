"""Rotary frequencies and the ways of writing them down, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.description.reading import parse_config
from engine.description.rope import RopeConfig, parse_rope
from engine.modeling.rope import build_rope_table, frequencies
from tests.engine.checkpoints import COMMON, LLAMA3_ROPE, YARN_ROPE

LENGTH = 4096
KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    LLAMA3_ROPE,
    {**LLAMA3_ROPE, "rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 1024},
    YARN_ROPE,
    {**YARN_ROPE, "rope_theta": 1000000.0, "beta_fast": 32.0},
    {**YARN_ROPE, "truncate": False},
    {**YARN_ROPE, "attention_factor": 0.7},
    {**YARN_ROPE, "factor": 40.0, "mscale": 0.8, "mscale_all_dim": 0.5},
    {**YARN_ROPE, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
]


def ours(scaling: dict[str, Any], **more: Any) -> RopeConfig:
    raw = COMMON | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": LENGTH, **more}
    return parse_config(raw | {"rope_parameters": scaling}).ropes[0]


@pytest.mark.parametrize("scaling", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies(scaling: dict[str, Any], head_dim: int) -> None:
    theirs = transformers.LlamaConfig(
        **(COMMON | {"head_dim": head_dim, "max_position_embeddings": LENGTH, "rope_parameters": scaling})
    )
    wanted, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"), seq_len=LENGTH)
    found = ours(scaling)
    torch.testing.assert_close(frequencies(found, head_dim, LENGTH), wanted, atol=0, rtol=1e-6)
    assert found.attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize("scaling", [one for one in KINDS if one["rope_type"] != "dynamic"])
def test_frequencies_where_a_part_of_each_head_is_rotated(scaling: dict[str, Any]) -> None:
    """As Phi-3, whose family can; the rest of the head stands still, and is not stretched."""
    scaling = scaling | {"partial_rotary_factor": 0.5}
    more = COMMON | {"head_dim": 64, "max_position_embeddings": LENGTH, "rope_parameters": scaling}
    theirs = transformers.LlamaConfig(**more)
    wanted, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"), seq_len=LENGTH)
    found = parse_rope(more, LENGTH, partial=True)
    assert found.rotated(64) == 32
    torch.testing.assert_close(frequencies(found, 32, LENGTH), wanted, atol=0, rtol=1e-6)
    table = build_rope_table(found, 64, LENGTH, dtype=torch.float32, device=torch.device("cpu"))
    assert bool((table.cos[..., 16:32] == 1).all() and (table.sin[..., 16:32] == 0).all())


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_old_key_says_the_same(key: str) -> None:
    scaling = {name: value for name, value in YARN_ROPE.items() if name not in ("rope_type", "rope_theta")}
    raw = COMMON | {"architectures": ["LlamaForCausalLM"], "rope_theta": 1000.0}
    assert parse_config(raw | {"rope_scaling": {key: "yarn", **scaling}}).ropes == (ours(YARN_ROPE),)


def test_reach() -> None:
    assert ours({"rope_type": "default", "rope_theta": 1e4}).reach(LENGTH) == LENGTH
    assert ours({"rope_type": "linear", "factor": 2.0}).reach(LENGTH) == 2 * LENGTH
    assert ours(YARN_ROPE).reach(LENGTH) == 128
    assert ours(LLAMA3_ROPE).reach(LENGTH) == LENGTH


def test_dynamic_base_is_that_of_the_longest_length() -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    theirs = transformers.LlamaConfig(**(COMMON | {"max_position_embeddings": LENGTH, "rope_parameters": scaling}))
    wanted, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, torch.device("cpu"), seq_len=2 * LENGTH)
    torch.testing.assert_close(frequencies(ours(scaling), 12, 2 * LENGTH), wanted, atol=0, rtol=1e-6)


def test_table_layout() -> None:
    table = build_rope_table(RopeConfig(), 8, 5, dtype=torch.float32, device=torch.device("cpu"))
    assert table.cos.shape == table.sin.shape == (5, 1, 8)
    assert torch.equal(table.sin[:, :, :4], -table.sin[:, :, 4:])
    assert torch.equal(table.cos[:, :, :4], table.cos[:, :, 4:])


@pytest.mark.parametrize("longest", [1024, LENGTH], ids=["short", "long"])
def test_longrope_by_the_longest_length(longest: int) -> None:
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
        "original_max_position_embeddings": 1024,
    }
    more = {"original_max_position_embeddings": 1024, "max_position_embeddings": LENGTH}
    theirs = transformers.LlamaConfig(**(COMMON | more | {"head_dim": 12, "rope_parameters": scaling}))
    wanted, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"), seq_len=longest)
    found = ours(scaling, head_dim=12)
    torch.testing.assert_close(frequencies(found, 12, longest), wanted, atol=0, rtol=1e-6)
    assert found.attention_factor == pytest.approx(attention_factor) and attention_factor > 1
