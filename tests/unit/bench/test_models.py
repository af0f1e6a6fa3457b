"""Checkpoints that benches make: their sizes, what a token reads of them, and that ours and others load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.description.reading import parse_config
from engine.description.spec import AttentionSpec
from scripts.bench.common import models
from scripts.bench.common.specs import SPECS

MIXTURES = ("moe", "gpt-oss")


def small(name: str) -> dict[str, Any]:
    """The same layers, but few and narrow."""
    narrow = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 16, "n_embd": 48}
    few = {"num_hidden_layers": 2, "n_layer": 2, "vocab_size": 300, "num_experts": 8, "num_local_experts": 8}
    changed = {key: value for key, value in (narrow | few).items() if key in SPECS[name]}
    kinds = {"layer_types": SPECS[name]["layer_types"][:2]} if "layer_types" in SPECS[name] else {}
    return SPECS[name] | changed | kinds


def test_the_models_have_their_sizes() -> None:
    assert {name: models.weight_bytes(name) // 2 for name in SPECS} == {
        "S": 134_515_008,
        "M": 348_701_696,
        "moe": 497_045_760,
        "gpt-oss": 351_310_912,
        "gpt2": 133_038_336,
        "gemma3": 131_783_296,
    }


def test_a_token_reads_everything_but_embeddings_that_are_not_the_head() -> None:
    assert models.streamed_bytes("S") == models.weight_bytes("S"), "the embedding is the head too"
    assert models.weight_bytes("M") - models.streamed_bytes("M") == 2 * 32_000 * 1024
    assert models.weight_bytes("gpt2") - models.streamed_bytes("gpt2") == 2 * 4096 * 768, "learned positions"
    assert models.weight_bytes("gemma3") == models.streamed_bytes("gemma3")


def test_a_token_reads_of_a_mixture_what_it_takes() -> None:
    expert = 3 * 768 * 256
    assert models.weight_bytes("moe") - models.streamed_bytes("moe") == 2 * 12 * (64 - 8) * expert
    expert = 3 * 512 * 512 + 2 * 512 + 512
    embedding = 32_000 * 512
    assert models.weight_bytes("gpt-oss") - models.streamed_bytes("gpt-oss") == 2 * (12 * 28 * expert + embedding)
    vectors_and_rest = models.streamed_bytes("moe") - 2 * models.streamed_bytes("moe", quantization="int8")
    assert -50_000 < vectors_and_rest < 0, "vectors are not halved"


def test_the_mixtures_are_what_they_are_called() -> None:
    described = parse_config(SPECS["moe"])
    assert {(layer.mlp.experts.count, layer.mlp.experts.top_k) for layer in described.layers if layer.mlp.experts} == {
        (64, 8)
    }
    oss = parse_config(SPECS["gpt-oss"])
    heads = [layer.attention for layer in oss.layers if isinstance(layer.attention, AttentionSpec)]
    assert [a.window for a in heads] == [128, 0] * 6 and all(a.sinks for a in heads)
    assert {layer.mlp.activation for layer in oss.layers} == {"clamped_swiglu"}
    assert oss.ropes[0].kind == "yarn"


@pytest.mark.parametrize("name", ["moe", "gpt-oss", "gpt2", "gemma3"])
def test_transformers_takes_every_tensor(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    models.write_weights(tmp_path, small(name))
    models.write_config(tmp_path, small(name))
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert sum(p.numel() for p in model.parameters()) == sum(tensor.numel() for tensor in stored.values())


@pytest.mark.parametrize("name", sorted(SPECS))
def test_norms_begin_as_one_and_the_rest_is_normal(name: str, tmp_path: Path) -> None:
    models.write_weights(tmp_path, small(name))
    stored = load_file(tmp_path / "model.safetensors")
    norm = 0.0 if name == "gemma3" else 1.0  # stored as what is added to one
    norms = [tensor for key, tensor in stored.items() if ("norm" in key or "ln_" in key) and key.endswith("weight")]
    assert len(norms) >= 5 and all(bool((tensor == norm).all()) for tensor in norms)
    rest = torch.cat([t.flatten().float() for key, t in stored.items() if "norm" not in key and "ln_" not in key])
    assert float(rest.std()) == pytest.approx(models.SCALE, rel=0.02) and abs(float(rest.mean())) < 1e-3
    biases = [tensor for key, tensor in stored.items() if key.endswith(("bias", "sinks"))]
    assert all(0 < float(tensor.float().abs().max()) < 0.2 for tensor in biases)
    assert bool(biases) == (name in ("gpt-oss", "gpt2"))


def test_a_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECS, "gpt2", small("gpt2") | {"vocab_size": 8400})
    models.ensure(tmp_path, "gpt2")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 8400
    (tmp_path / "model.safetensors").unlink()
    models.ensure(tmp_path, "gpt2")
    assert not (tmp_path / "model.safetensors").exists(), "complete already"


def test_int4_has_a_scale_for_each_group() -> None:
    held = models.weight_bytes("S", quantization="int4")
    layers = 30 * 576 * (576 * 2 + 384 + 3 * 1536)
    # 9 groups of 64 in 576 features, 24 in 1,536: a scale for each in every row
    scales = 2 * 30 * (9 * (576 + 2 * 192 + 576 + 2 * 1536) + 24 * 576)
    assert held == layers // 2 + scales + 49_152 * 576 + 2 * 576 * 61
