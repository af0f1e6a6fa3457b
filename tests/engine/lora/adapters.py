"""Random adapters of small checkpoints, written by PEFT, and its merged models as the oracle."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

Values = dict[str, Any]


def save_adapter(
    model: Any, directory: Path, *, seed: int = 0, scale: float = 0.3, merged: bool = True, **config: Any
) -> Any:
    """Write a random adapter of a transformers model; returns a copy of that model, which stays as it was: with the
    adapter merged into its weights, or beside them, where a head is tied and would be changed with the embedding."""
    import copy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")  # takes seconds: not where tests are collected
    chosen = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**chosen))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * scale / parameter.shape[-1] ** 0.5
        adapted.save_pretrained(directory)
        return (adapted.merge_and_unload() if merged else adapted).eval()
