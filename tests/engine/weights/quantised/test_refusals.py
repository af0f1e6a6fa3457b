"""What cannot be served of quantised checkpoints: one line that names the tensor or the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.description.reading import read_config
from engine.loading.fingerprint import DigestedSource
from engine.weights.digest import DigestMemory
from engine.weights.quantised.reading import parse_scheme
from engine.weights.source import Checkpoint
from shared.errors import ModelError
from tests.engine.weights.quantised.encoders import Encoded, change_config, change_tensors, float8, gptq, quantise

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32}
AUTO_ROUND: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block"}
MODULE = "model.layers.1.self_attn.v_proj"


def compressed(weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups} | changes


SCHEMES: dict[str, tuple[Any, str]] = {
    "no object": ("gptq", "quantization_config must be an object, got 'gptq'"),
    "unknown": ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes', which is not served; served: gptq"),
    "no method": ({"bits": 4}, "quant_method is None"),
    "2 bits": (GPTQ | {"bits": 2}, "quantization_config.bits is 2; quantised weights of 4 or 8 bits are served"),
    "3 bits": (GPTQ | {"bits": 3}, "bits is 3"),
    "no bits": (GPTQ | {"bits": None}, "bits is None"),
    "group": (GPTQ | {"group_size": 0}, "group_size must be -1 or a positive integer, got 0"),
    "sym": (GPTQ | {"sym": "yes"}, "sym must be true or false, got 'yes'"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "dynamic bits": (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 3}}}, "dynamic.+:.*down.*.bits is 3"),
    "dynamic expression": (GPTQ | {"dynamic": {"-:(": {}}}, "dynamic.-:( is no regular expression"),
    "AWQ of 8 bits": (AWQ | {"bits": 8}, "bits is 8; quantised weights of 4 bits are served"),
    "gemv": (AWQ | {"version": "gemv"}, "version is 'gemv', which is not served; served: gemm"),
    "packing": (AUTO_ROUND | {"packing_format": "auto_round:gguf"}, "packing_format is 'auto_round:gguf'"),
    "mx integers": (AUTO_ROUND | {"data_type": "mx_int"}, "data_type is 'mx_int'"),
    "a module's bits": (AUTO_ROUND | {"extra_config": {"a.b": {"bits": 2}}}, "extra_config.a.b.bits is 2"),
    "2:4": (compressed(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "2:4 sparse weights are not served"),
    "marlin-24": (compressed(INT4, format="marlin-24"), "format is 'marlin-24': 2:4 sparse"),
    "rotated": (compressed(INT4, transform_config={"config_groups": {"u": {}}}), "transform_config is not served"),
    "3 bits packed": (compressed(INT4 | {"num_bits": 3}), "group_0.weights.num_bits is 3"),
    "targets": (compressed(INT4, ignore=["re:("]), "'re:(' is no regular expression"),
    "a strategy": (compressed(INT4 | {"strategy": "attn_head"}), "weights.strategy is 'attn_head'"),
    "blocks": (
        compressed(BLOCKS | {"block_structure": [0, 1]}, format="float-quantized"),
        "block_structure must be two positive integers, got [0, 1]",
    ),
    "E5M2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2', which is not served"),
    "FP4 experts": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
}  # fmt: skip


@pytest.mark.parametrize("case", SCHEMES)
def test_schemes(case: str) -> None:
    scheme, message = SCHEMES[case]
    with pytest.raises(ModelError) as caught:
        parse_scheme(scheme)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def encoded(module: str, weight: Tensor) -> Encoded:
    return gptq(weight, symmetric=True)


def taken(directory: Path) -> None:
    source = Checkpoint(directory, read_config(directory))
    for part in source.tensors.parts():
        source.take(part)
    source.release()


def poke(name: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[MODULE + name].view(-1)[5] = value

    return change


def replaced(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({MODULE + name: tensor})


# what is done to one module's tensors -> what is said of it
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "NaN": (poke(".scales", float("nan")), f"tensor {MODULE}.scales holds scales that are not finite"),
    "infinite": (poke(".scales", float("inf")), f"tensor {MODULE}.scales holds scales that are not finite"),
    "zero": (poke(".scales", 0.0), f"tensor {MODULE}.scales holds scales that are zero"),
    "short": (replaced(".qweight", torch.zeros(7, 64, dtype=torch.int32)), "has shape [7, 64], expected [8, 128] (4"),
    "format": (replaced(".qweight", torch.zeros(8, 64)), ".qweight has dtype F32, expected I32"),
    "missing": (lambda tensors: tensors.pop(f"{MODULE}.scales"), f"tensor {MODULE}.scales is missing"),
    "bias": (replaced(".bias", torch.ones(64)), f"tensor {MODULE}.bias is not zero, and {MODULE} has no bias"),
    "another": (replaced(".lora", torch.ones(64)), f"has {MODULE}.lora, which LlamaForCausalLM"),
    "uneven groups": (
        replaced(".g_idx", torch.zeros(64, dtype=torch.int32)),
        f"tensor {MODULE}.g_idx does not give 64 input features to groups of 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case: str, tmp_path: Path) -> None:
    change, message = TENSORS[case]
    quantise(tmp_path, GPTQ, encoded)
    taken(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(ModelError) as caught:
        taken(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_other_fp8(tmp_path: Path) -> None:
    scheme = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    quantise(tmp_path, scheme, lambda module, weight: float8(weight, 32, 32))
    taken(tmp_path)
    change_tensors(tmp_path, replaced(".weight", torch.zeros(64, 64).to(torch.float8_e5m2)))
    with pytest.raises(ModelError, match=r"v_proj\.weight has dtype F8_E5M2, expected F8_E4M3"):
        taken(tmp_path)


def test_a_module_that_the_configuration_leaves_but_the_file_packs(tmp_path: Path) -> None:
    quantise(tmp_path, GPTQ | {"dynamic": {"-:.*v_proj": {}}}, encoded)
    with pytest.raises(ModelError, match=r"v_proj\.weight is missing: quantization_config leaves .*v_proj in 16 bits"):
        taken(tmp_path)


def test_a_size_that_fills_no_words(tmp_path: Path) -> None:
    quantise(tmp_path, GPTQ, encoded)
    change_config(tmp_path, intermediate_size=84)
    with pytest.raises(ModelError, match=r"84 (in|out)put features of 4 bits fill no 32-bit words"):
        taken(tmp_path)


def digest(directory: Path) -> str:
    source = Checkpoint(directory, read_config(directory))
    digested = DigestedSource(source, None, DigestMemory(directory / "memory"))
    for part in source.tensors.parts():
        source.take(part)
    source.release()
    return digested.value()


def test_the_digest_covers_every_stored_tensor(tmp_path: Path) -> None:
    quantise(tmp_path, GPTQ, lambda module, weight: gptq(weight, index=True, symmetric=True))
    whole = digest(tmp_path)
    for suffix in (".qweight", ".qzeros", ".scales"):
        change_tensors(tmp_path, poke(suffix, 3))
        changed = digest(tmp_path)
        assert changed != whole, f"{suffix} was changed"
        whole = changed
