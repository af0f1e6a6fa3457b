"""Every published layout and its traps, from writers of our own: exact weights, and what a runner makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.description.reading import read_config
from engine.weights.source import Checkpoint
from tests.engine.checkpoints import KERNELS
from tests.engine.weights.quantised.encoders import (
    Encode,
    Encoded,
    awq,
    float4,
    float8,
    gptq,
    packed_integers,
    quantise,
)
from tests.engine.weights.quantised.served import assert_served


class Layout(NamedTuple):
    scheme: dict[str, Any]
    encode: Encode
    file: str = "config.json"


def every(encode: Callable[[Tensor], Encoded]) -> Encode:
    return lambda module, weight: encode(weight)


def shuffled(weight: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(weight.shape[1]).permutation(weight.shape[1])


def with_bias(weight: Tensor) -> Encoded:
    stored, dequantised = gptq(weight, symmetric=True)
    return stored | {".bias": torch.zeros(len(weight), dtype=torch.float16)}, dequantised


def positive(weight: Tensor) -> Encoded:
    """Zeros of 0, which the first version stores as 15."""
    stored, dequantised = gptq(weight.abs())
    assert bool((stored[".qzeros"] == -1).all())
    return stored, dequantised


def dynamic(module: str, weight: Tensor) -> Encoded | None:
    if re.match(r".*\.k_proj", module):
        return None
    return gptq(weight, 8, 16, symmetric=True) if module.endswith("down_proj") else gptq(weight, symmetric=True)


def extra(module: str, weight: Tensor) -> Encoded | None:
    if module.startswith("model.layers.2."):
        return None
    if module == "model.layers.0.self_attn.q_proj":
        return gptq(weight, 8, less=0)
    return gptq(weight, 4, 16, less=0) if "mlp.up" in module else gptq(weight, less=0)


def mixed(module: str, weight: Tensor) -> Encoded | None:
    """Three schemes within one joined projection, and one that stays."""
    if module.endswith("v_proj"):
        return float8(weight, 1, weight.shape[1], ".weight_scale")
    if module.endswith("q_proj"):
        return packed_integers(weight, 32, shuffled(weight))
    return None


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
SYMMETRIC = GPTQ | {"sym": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "packing_format": "auto_round"}
EXTRA: dict[str, Any] = {
    "model.layers.0.mlp.up": {"bits": 8},  # a name, and no module's
    "model.layers.0.self_attn.q_proj": {"bits": 8},
    ".*mlp\\.up.*": {"group_size": 16},
}
ACTORDER = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": False,
    "actorder": "group",
}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "all": {"targets": ["Linear"], "weights": ACTORDER, "format": "pack-quantized"},
        "values": {"targets": ["re:.*v_proj$"], "weights": CHANNEL, "format": "float-quantized"},
    },
    "ignore": ["re:.*(k_proj|o_proj)$", "re:.*mlp.*", "lm_head"],
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 32], "fmt": "e4m3"}
LAYOUTS = {
    "gptq-v1": Layout(GPTQ, every(gptq)),
    "gptq-v2": Layout(GPTQ | {"checkpoint_format": "gptq_v2"}, every(lambda w: gptq(w, less=0))),
    "gptq-v1-zero": Layout(GPTQ, every(positive)),
    "gptq-symmetric-v2-zeros-as-v1": Layout(SYMMETRIC, every(lambda w: gptq(w, symmetric=True, less=0))),
    "gptq-trivial-index": Layout(GPTQ, every(lambda w: gptq(w, index=True))),
    "gptq-order": Layout(GPTQ | {"desc_act": True}, every(lambda w: gptq(w, order=shuffled(w)))),
    "gptq-all-inputs": Layout(GPTQ | {"group_size": -1}, every(lambda w: gptq(w, group=w.shape[1]))),
    "gptq-8-bits": Layout(GPTQ | {"bits": 8, "group_size": 128}, every(lambda w: gptq(w, 8, 128))),
    "gptq-stray-bias": Layout(SYMMETRIC, every(with_bias)),
    "gptq-dynamic": Layout(
        SYMMETRIC | {"dynamic": {"-:.*\\.k_proj": {}, "+:.*down_proj$": {"bits": 8, "group_size": 16}}}, dynamic
    ),
    "gptq-file-of-its-own": Layout({"bits": 4, "group_size": 32, "sym": False}, every(gptq), "quantize_config.json"),
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, every(awq)),
    "awq-file-of-its-own": Layout(
        {"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"},
        every(lambda w: awq(w, 16)),
        "quant_config.json",
    ),
    "auto-round-own": Layout(
        AUTO_ROUND | {"extra_config": EXTRA, "block_name_to_quantize": ["model.layers.0", "model.layers.1"]}, extra
    ),
    "mixed": Layout(MIXED, mixed),
    "fp8-blocks-with-edges": Layout(FP8, every(lambda w: float8(w, 48, 32))),
    "modelopt-fp8": Layout(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}},
        every(lambda w: float8(w, len(w), w.shape[1], ".weight_scale")),
        "hf_quant_config.json",
    ),
    "modelopt-nvfp4": Layout({"quant_method": "modelopt", "quant_algo": "NVFP4"}, every(float4)),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, kernels: str, tmp_path: Path) -> None:
    scheme, encode, file = LAYOUTS[name]
    model = quantise(tmp_path, scheme, encode, file=file)
    source = Checkpoint(tmp_path, read_config(tmp_path))
    weights, quantised = dict(model.named_parameters()), 0
    for part in source.tensors.parts():
        assert torch.equal(source.take(part), weights[part.name]), part.name
        quantised += source.quantised_as(part) is not None
    assert quantised >= 6
    assert_served(tmp_path, kernels, model)


def test_codes_keep_the_order_of_input_features_beside_them(tmp_path: Path) -> None:
    quantise(tmp_path, GPTQ | {"desc_act": True}, every(lambda w: gptq(w, order=shuffled(w))))
    source = Checkpoint(tmp_path, read_config(tmp_path))
    part = source.tensors.layers[0]["output"][0]
    codes = source.take_codes(part)
    assert codes is not None and codes.gather is not None and (codes.bits, codes.group) == (4, 32)
    assert sorted(codes.gather.tolist()) == list(range(part.shape[1]))
    assert torch.equal(codes.dequantised(), source.take(part))
    trivial = tmp_path / "trivial"
    quantise(trivial, GPTQ, every(lambda w: gptq(w, index=True)))
    source = Checkpoint(trivial, read_config(trivial))
    codes = source.take_codes(source.tensors.layers[0]["output"][0])
    assert codes is not None and codes.gather is None


def test_powers_of_two_are_exact() -> None:
    from engine.weights.quantised.module_tensors import ModuleTensors

    octets = torch.arange(255, dtype=torch.uint8)
    found = ModuleTensors("m", {".s": octets}).powers(".s")
    assert found.tolist() == [2.0 ** (int(octet) - 127) for octet in octets]
