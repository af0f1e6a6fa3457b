"""Adapters that cannot be served are refused by a line that names the file and what is at fault there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.description.reading import read_config
from engine.lora.adapter import read_adapter
from engine.weights.source import open_weights
from shared.errors import ModelError
from tests.engine.checkpoints import save_checkpoint
from tests.engine.lora.adapters import save_adapter

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "bias": ({"bias": "lora_only"}, "bias"),
    "bias of its own": ({"lora_bias": True}, "lora_bias"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    "another kind": ({"peft_type": "LOHA"}, "peft_type"),
    "a base that was changed": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    "no rank": ({"r": 0}, "r 0"),
    "no number": ({"lora_alpha": None}, "lora_alpha"),
    "rank of a pattern": ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern"),
    "no expression": ({"alpha_pattern": {"q_proj(": 4}}, "alpha_pattern"),
    "a larger rank than stored": ({"r": 9}, r"q_proj.lora_A has shape \[8, 48\].*want \[9, 48\]"),
    "a larger rank than allowed": ({"r": 65}, "max_lora_rank is 64"),
    "not targeted": ({"target_modules": ["q_proj"]}, "v_proj has tensors and is not targeted"),
    "targeted, and not there": (
        {"target_modules": ["q_proj", "v_proj", "o_proj"]},
        "o_proj is targeted, and adapter_model.safetensors has no tensors",
    ),
}


def leave_out(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "not a number": (put(FIRST, torch.full((8, 48), float("nan"))), "lora_A.weight has values that are not"),
    "another base": (put(FIRST, torch.zeros(8, 32)), r"has shape \[8, 32\]"),
    "half": (leave_out(FIRST), "q_proj has no lora_A"),
    "embeddings": (put("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(8, 9)), "embed_tokens"),
    "another module": (
        put("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", torch.zeros(8, 48)),
        "layers.9.self_attn.q_proj is no linear of this model",
    ),
    "integers": (put(FIRST, torch.zeros(8, 48, dtype=torch.int32)), "a matrix is wanted"),
    "nothing": (lambda tensors: tensors.clear(), "has no tensors"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    model = save_checkpoint(directory / "base", "llama-mha", "torch")
    save_adapter(model, directory / "a", target_modules=["q_proj", "v_proj"])
    return directory


def read(saved: Path, directory: Path) -> None:
    spec = read_config(saved / "base")
    read_adapter(directory, spec, open_weights("auto", saved / "base", spec).tensors, max_rank=64)


def copied(saved: Path, to: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    values = json.loads((saved / "a" / "adapter_config.json").read_text(encoding="utf-8"))
    (to / "adapter_config.json").write_text(json.dumps(values | config), encoding="utf-8")
    tensors: dict[str, Tensor] = load_file(saved / "a" / "adapter_model.safetensors")
    return tensors


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_is_refused_by_its_key(case: str, saved: Path, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    save_file(copied(saved, tmp_path, config), tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=message):
        read(saved, tmp_path)


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_are_refused_by_their_names(case: str, saved: Path, tmp_path: Path) -> None:
    change, message = TENSORS[case]
    change(tensors := copied(saved, tmp_path, {}))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=message):
        read(saved, tmp_path)


def test_broken_files_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config.json cannot be read: No such file"):
        read(saved, tmp_path)
    copied(saved, tmp_path, {})
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match=r"adapter_model.safetensors cannot be read"):
        read(saved, tmp_path)
    (tmp_path / "adapter_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(ModelError, match=r"adapter_config.json cannot be read"):
        read(saved, tmp_path)


def test_the_digest_is_that_of_the_content(saved: Path, tmp_path: Path) -> None:
    spec = read_config(saved / "base")
    tensors = open_weights("auto", saved / "base", spec).tensors
    first = read_adapter(saved / "a", spec, tensors)
    stored = copied(saved, tmp_path, {"lora_alpha": 17})
    save_file(stored, tmp_path / "adapter_model.safetensors")
    assert first.digest == read_adapter(saved / "a", spec, tensors).digest
    assert first.digest != read_adapter(tmp_path, spec, tensors).digest
