"""Checkpoints of families with linear attention: projections by key head or by kind, and beside a vision part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.checkpoints import COMMON, EVEN, HYBRID, save_checkpoint
from tests.engine.description.test_spellings import found

KEY_HEADS: int = HYBRID["linear_num_key_heads"]
VALUE_HEADS: int = HYBRID["linear_num_value_heads"]
KEY: int = HYBRID["linear_key_head_dim"]
VALUE: int = HYBRID["linear_value_head_dim"]


def by_kind(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What Qwen3-Next joins head by head, as Qwen3.5 stores it."""
    changed, share = dict(tensors), VALUE_HEADS // KEY_HEADS
    for name in tensors:
        module = name.removesuffix("in_proj_qkvz.weight")
        if module == name:
            continue
        heads = changed.pop(name).view(KEY_HEADS, -1, tensors[name].shape[1])
        bounds = (KEY, 2 * KEY, 2 * KEY + share * VALUE)
        query, key, value, gate = (part.flatten(0, 1) for part in heads.tensor_split(bounds, dim=1))
        changed[f"{module}in_proj_qkv.weight"] = torch.cat((query, key, value))
        changed[f"{module}in_proj_z.weight"] = gate
        strengths = changed.pop(f"{module}in_proj_ba.weight").view(KEY_HEADS, 2, share, -1)
        for index, kind in enumerate("ba"):
            changed[f"{module}in_proj_{kind}.weight"] = strengths[:, index].flatten(0, 1)
    return {name: tensor.contiguous() for name, tensor in changed.items()}


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_projections_by_key_head_or_by_kind(kernels: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "heads", "qwen3-next-bias", kernels)
    shutil.copytree(tmp_path / "heads", tmp_path / "kinds")
    path = tmp_path / "kinds" / "model.safetensors"
    before = load_file(path)
    after = by_kind(before)
    assert len(after) > len(before)
    save_file(after, path)
    config = json.loads((tmp_path / "kinds" / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["Qwen3_5MoeForCausalLM"]
    (tmp_path / "kinds" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert found(tmp_path / "kinds", kernels) == found(tmp_path / "heads", kernels)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_the_text_part_of_a_model_that_sees_and_drafts(kernels: str, tmp_path: Path) -> None:
    text = COMMON | HYBRID | (EVEN if kernels == "native" else {})
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 48}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(7)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "both")
    path = tmp_path / "both" / "model.safetensors"
    tensors = load_file(path)
    assert any("visual" in name for name in tensors)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, path)
    (tmp_path / "text").mkdir()
    alone = {name.replace("model.language_model.", "model."): t for name, t in tensors.items() if "visual" not in name}
    save_file(alone, tmp_path / "text" / "model.safetensors")
    written = json.loads((tmp_path / "both" / "config.json").read_text(encoding="utf-8"))["text_config"]
    (tmp_path / "text" / "config.json").write_text(
        json.dumps({**written, "architectures": ["Qwen3_5ForCausalLM"]}), encoding="utf-8"
    )
    assert found(tmp_path / "both", kernels) == found(tmp_path / "text", kernels)
