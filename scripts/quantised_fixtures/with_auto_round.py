"""AutoRound's packings, and its exports to GPTQ and AWQ: `python -m scripts.quantised_fixtures.with_auto_round OUT`."""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.quantised_fixtures.common import keep, make_all, make_tokenizer

# name -> (format, arguments)
FIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq-4-symmetric": ("auto_gptq", {"group_size": 64}),
    "gptq-4-asymmetric": ("auto_gptq", {"group_size": 32, "sym": False}),
    "gptq-8-channel": ("auto_gptq", {"bits": 8, "group_size": -1}),
    "awq-asymmetric": ("auto_awq", {"group_size": 64, "sym": False}),
    "awq-symmetric": ("auto_awq", {"group_size": 32}),
    "auto-round-gptq": ("auto_round:auto_gptq", {"group_size": 64}),
    "auto-round-awq": ("auto_round:auto_awq", {"group_size": 64, "sym": False}),
    "auto-round-own": (
        "auto_round",
        {"group_size": 64, "layer_config": {"o_proj": {"bits": 8}, "k_proj": {"bits": 16}}},
    ),
    "auto-round-fp8": ("auto_round:fp8", {"scheme": "FP8_BLOCK"}),
}


def make(name: str, base: Path, out: Path) -> None:
    transformers, auto_round = (importlib.import_module(package) for package in ("transformers", "auto_round"))
    layout, arguments = FIXTURES[name]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    scheme = {"bits": 4} | arguments if "scheme" not in arguments else arguments
    with tempfile.TemporaryDirectory() as folder:
        rounding = auto_round.AutoRound(model, make_tokenizer(), iters=0, disable_opt_rtn=True, **scheme)
        rounding.quantize_and_save(folder, format=layout)
        (made,) = (path.parent for path in Path(folder).rglob("model.safetensors"))
        keep(made, out / name, ["auto-round"], dequantised(made))


def dequantised(made: Path) -> dict[str, Tensor]:
    """By the package's own code: its function for AWQ, and for GPTQ what its modules make of the unit vectors."""
    tensors = load_file(made / "model.safetensors")
    scheme = json.loads((made / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    if "awq" in scheme.get("packing_format", scheme["quant_method"]):
        return _dequantised_awq(tensors, scheme)
    if scheme["data_type"] == "fp":
        return _dequantised_fp8(tensors, scheme)
    linear = importlib.import_module("auto_round_extension.torch.qlinear_torch_zp").QuantLinear
    found = {}
    for module in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        stored = {kind: tensors[f"{module}.{kind}"] for kind in ("qweight", "qzeros", "scales")}
        bits = scheme.get("extra_config", {}).get(module, scheme)["bits"]
        rows, columns = stored["scales"].shape[1], stored["qweight"].shape[0] * 32 // bits
        layer = linear(bits, scheme["group_size"], columns, rows, bias=False)
        layer.load_state_dict(stored)
        with torch.inference_mode():
            found[f"{module}.weight"] = layer(torch.eye(columns, dtype=torch.float16)).t().contiguous()
    return found


def _dequantised_fp8(tensors: dict[str, Tensor], scheme: dict[str, Any]) -> dict[str, Tensor]:
    """With the functions that the package cuts weights into blocks with.

    Not by transformers, which makes blocks of equal size where the last ones are cut off.
    """
    package = importlib.import_module("auto_round.export.export_to_autoround.export_to_fp8")
    found = {}
    for name in [name.removesuffix("_scale_inv") for name in tensors if name.endswith(".weight_scale_inv")]:
        whole = tensors[name].to(torch.float32), tuple(scheme["weight_block_size"])
        blocks, shape, padding = package.reshape_pad_tensor_by_group_size(*whole)
        values = blocks * tensors[f"{name}_scale_inv"].float()[..., None, None]
        found[name] = package.revert_tensor_by_pad(values, orig_shape=shape, pad_len=padding).to(torch.bfloat16)
    return found


def _dequantised_awq(tensors: dict[str, Tensor], scheme: dict[str, Any]) -> dict[str, Tensor]:
    dequantize = importlib.import_module("auto_round.export.export_to_awq.utils").dequantize_gemm
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    found = {}
    for module in modules:
        stored = (tensors[f"{module}.{kind}"] for kind in ("qweight", "qzeros", "scales"))
        found[f"{module}.weight"] = dequantize(*stored, scheme["bits"], scheme["group_size"]).t().contiguous()
    return found


if __name__ == "__main__":
    make_all(FIXTURES, make, torch.float16)
