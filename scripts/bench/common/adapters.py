"""Random adapters of any checkpoint, in PEFT's format, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.description.reading import read_config
from engine.lora.adapter import SLOTS
from engine.weights.source import open_weights


def write_adapter(
    base: Path,
    directory: Path,
    *,
    seed: int = 0,
    rank: int = 8,
    slots: Sequence[str] = SLOTS,
    scale: float = 0.05,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """For all linears of these slots; `scale`: about how large is what it adds.  Returns `directory`."""
    spec = read_config(base)
    generator, tensors, names = torch.Generator().manual_seed(seed), {}, set()
    for parts in open_weights("auto", base, spec).tensors.layers:
        for slot in slots:
            for part in parts.get(slot, ()):
                module = part.name.removesuffix(".weight")
                outer, inner = part.shape[::-1] if part.transposed else part.shape
                for which, shape, size in (("A", (rank, inner), inner**-0.5), ("B", (outer, rank), scale)):
                    value = (torch.randn(shape, generator=generator) * size).to(dtype)
                    tensors[f"base_model.model.{module}.lora_{which}.weight"] = value
                names.add(module.rpartition(".")[2])
    directory.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(names), **config}
    (directory / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
