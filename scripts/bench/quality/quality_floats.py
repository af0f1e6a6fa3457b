"""A checkpoint's layers in FP8 with scales of blocks, or in MXFP4, rounded to nearest, as publishers store them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.ops.linears.codes import E2M1, Codes

WEIGHTS = "model.safetensors"
FP8, MXFP4 = "fp8, blocks of 128", "mxfp4"
BLOCK, GROUP, LARGEST = 128, 32, 448.0
BITS = {FP8: 8.0, MXFP4: 4.25}  # of a weight as it is stored, scales included
SCHEMES: dict[str, dict[str, Any]] = {
    FP8: {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    MXFP4: {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": GROUP}}
        },
        "ignore": ["lm_head"],
    },
}


def rewrite(source: Path, target: Path, changed: Callable[[str, Tensor], dict[str, Tensor]], **config: Any) -> None:
    """The same model in float32, but for the matrices of its layers: what `changed` makes of each, by its name.

    `config`: fields that are added to config.json.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        is_linear = tensor.ndim == 2 and ".layers." in name
        tensors |= changed(name, tensor.float()) if is_linear else {name: tensor.float()}
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(raw | config), encoding="utf-8")
    shutil.copy(source / "tokenizer.json", target / "tokenizer.json")


def write_floats(source: Path, target: Path, kind: str, *, stored: bool) -> None:
    """The same model in `kind`, as codes with their scheme or as the float32 that these stand for."""

    def coded(name: str, tensor: Tensor) -> dict[str, Tensor]:
        found, codes = _fp8(name, tensor) if kind == FP8 else _mxfp4(name, tensor)
        return found if stored else {name: codes.dequantised()}

    rewrite(source, target, coded, **({"quantization_config": SCHEMES[kind]} if stored else {}))


def _fp8(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Codes]:
    rows, columns = tensor.shape
    padded = torch.nn.functional.pad(tensor, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / LARGEST).clamp_min(1e-12)
    each = scales.repeat_interleave(BLOCK, 0)[:rows]
    codes = (tensor / each.repeat_interleave(BLOCK, 1)[:, :columns]).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}, Codes(codes, each, BLOCK, 8)


def _mxfp4(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Codes]:
    groups = tensor.view(len(tensor), -1, GROUP)
    exponents = groups.abs().amax(2).clamp_min(2.0**-100).log2().floor() - 2  # 4 <= the largest < 8
    numbers = groups / exponents.exp2()[:, :, None]
    codes = (numbers[..., None] - E2M1).abs().argmin(-1).flatten(1).to(torch.uint8)
    found = {
        f"{name}_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        f"{name}_scale": (exponents + 127).to(torch.uint8),
    }
    return found, Codes(codes, exponents.exp2(), GROUP, 4, table=E2M1)
