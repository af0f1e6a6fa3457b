"""compressed-tensors' layouts, made by llmcompressor: `python -m scripts.quantised_fixtures.with_llmcompressor OUT`."""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.quantised_fixtures.common import calibration_tokens, keep, make_all, make_tokenizer

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False, "dynamic": False}
# name -> (weights or a preset, activations, needs calibration)
FIXTURES: dict[str, tuple[Any, Any, bool]] = {
    "ct-w4a16": (INT4, None, False),
    "ct-w4a16-asymmetric": (INT4 | {"symmetric": False, "group_size": 32}, None, False),
    "ct-w4a16-channel": (INT4 | {"strategy": "channel", "group_size": None}, None, False),
    "ct-w4a16-actorder": (INT4 | {"actorder": "weight"}, None, True),
    "ct-w8a16": (INT8, None, False),
    "ct-w8a16-asymmetric": (INT8 | {"symmetric": False}, None, False),
    "ct-w8a8-dynamic": ("W8A8", None, False),
    "ct-w8a8-static": (INT8, STATIC, True),
    "ct-fp8-tensor": ("FP8", None, True),
    "ct-fp8-dynamic": ("FP8_DYNAMIC", None, False),
    "ct-fp8-block": ("FP8_BLOCK", None, False),
    "ct-nvfp4": ("NVFP4", None, True),
    "ct-mxfp4": ("MXFP4A16", None, False),
}
IGNORED = ["lm_head", "re:.*down_proj"]


def make(name: str, base: Path, out: Path) -> None:
    transformers, llmcompressor, datasets = (
        importlib.import_module(package) for package in ("transformers", "llmcompressor", "datasets")
    )
    _, _, calibrated = FIXTURES[name]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    rows = calibration_tokens()
    data = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    more = {"dataset": data, "processor": make_tokenizer(), "max_seq_length": len(rows[0])} if calibrated else {}
    llmcompressor.oneshot(model=model, recipe=_recipe(name), num_calibration_samples=len(rows), **more)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        model.save_pretrained(made, save_compressed=True)
        keep(made, out / name, ["llmcompressor", "compressed-tensors"], dequantised(made))


def _recipe(name: str) -> Any:
    quantization = importlib.import_module("compressed_tensors.quantization")
    modifiers = importlib.import_module("llmcompressor.modifiers.quantization")
    gptq = importlib.import_module("llmcompressor.modifiers.gptq")
    weights, activations, _ = FIXTURES[name]
    if isinstance(weights, str):
        return modifiers.QuantizationModifier(targets="Linear", scheme=weights, ignore=IGNORED)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"],
        weights=quantization.QuantizationArgs(**weights),
        input_activations=None if activations is None else quantization.QuantizationArgs(**activations),
    )
    kind = gptq.GPTQModifier if "actorder" in weights else modifiers.QuantizationModifier
    return kind(config_groups={"group_0": scheme}, ignore=IGNORED)


def dequantised(made: Path) -> dict[str, Tensor]:
    """What the package's own compressors make of each module's tensors."""
    compressors = importlib.import_module("compressed_tensors.compressors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    (group,) = config["config_groups"].values()
    scheme = quantization.QuantizationScheme(**{**group, "format": None})
    compressor = compressors.BaseCompressor.get_value_from_registry(group.get("format") or config["format"])
    tensors, found = load_file(made / "model.safetensors"), {}
    for scale in [name for name in tensors if name.endswith(".weight_scale")]:
        module = scale.removesuffix("weight_scale")
        stored = {name.removeprefix(module): one for name, one in tensors.items() if name.startswith(module)}
        found[f"{module}weight"] = compressor.decompress(stored, scheme)["weight"]
    return found


if __name__ == "__main__":
    make_all(FIXTURES, make, torch.bfloat16)
